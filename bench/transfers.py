"""What a program that XLA compiled for an accelerator transfers, expects and starts, as its text
says.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

BYTES = {
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "bf16": 2,
    "f16": 2,
    "s16": 2,
    "u16": 2,
    "s8": 1,
    "u8": 1,
    "pred": 1,
}
ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\](\{{[^}}]*\}})?")
LINE = re.compile(r"\s*(?:ROOT )?(%[\w.-]+) = (.*?[\})\]]) ([a-z][\w-]*)\((.*)")
COMPUTATION = re.compile(r"^(%[\w.-]+) \(.*?\{\n(.*?)^\}", re.M | re.S)
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "copy-done", "slice-done")
SAME = ("bitcast", "convert", "copy", "multiply", "reshape")  # on the way to a slice
COLLECTIVE = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
PALLAS = 'custom_call_target="tpu_custom_call"'
CLOCK, BANDWIDTH = 1.5e9, 819e9  # of a TPU v5e: cycles, and bytes from and to memory, per second
PROGRAMS = ("while", "conditional", "call", "async-start")  # of programs of their own


def transferred(program: str) -> int:
    """The bytes that the instructions of a compiled program read and write in main memory.

    What lies beside a TPU's cores (S(1) in a layout) costs none, and of what an instruction takes a
    slice of, the slice. Of a conditional the branch counts that :func:`cycles` counts.

    >>> transferred('''
    ... %f (x: f32[8,128]) -> f32[8] {
    ...   %x = f32[8,128]{1,0} parameter(0)
    ...   %part = f32[8,32]{1,0} slice(%x), slice={[0:8], [0:32]}
    ...   ROOT %sum = f32[8]{0} reduce(%part, %zero), dimensions={1}, to_apply=%add
    ... }
    ... %g (x: f32[8,128], sum: f32[8]) -> f32[8,128] {
    ...   %x = f32[8,128]{1,0} parameter(0)
    ...   %sum = f32[8]{0} parameter(1)
    ...   %by = f32[8,128]{1,0} broadcast(%sum), dimensions={0}
    ...   ROOT %y = f32[8,128]{1,0} multiply(%x, %by)
    ... }
    ... ENTRY %main (x: f32[8,128]) -> f32[8,128] {
    ...   %x = f32[8,128]{1,0:T(8,128)} parameter(0)
    ...   %sum = f32[8]{0:T(128)S(1)} fusion(%x), kind=kLoop, calls=%f
    ...   ROOT %y = f32[8,128]{1,0:T(8,128)} fusion(%x, %sum), kind=kLoop, calls=%g
    ... }''') / (4 * 8 * 128)
    2.25
    """
    return round(sum(moved for _, moved in _transfers(program)))


def cycles(program: str) -> int:
    """Return how many cycles a TPU's compiler expects a program to take.

    The body of a loop counts as often as the loop runs, and of a conditional the branch that
    jax.lax.cond takes where its predicate is False: norms branch where data are out of the
    ordinary. A compiler expects none of a Pallas kernel, for which the cycles count in which a v5e
    moves its bytes.

    >>> cycles('''
    ... %body (i: s32[]) -> s32[] {
    ...   %i = s32[] parameter(0)
    ...   ROOT %next = s32[] fusion(%i), calls=%add, backend_config={"estimated_cycles":"7"}
    ... }
    ... %condition (i: s32[]) -> pred[] {
    ...   %last = s32[] constant(10)
    ...   %i = s32[] parameter(0)
    ...   ROOT %lt = pred[] compare(%i, %last), direction=LT
    ... }
    ... ENTRY %main (x: s32[]) -> s32[] {
    ...   %x = s32[] fusion(), calls=%start, backend_config={"estimated_cycles":"5"}
    ...   ROOT %y = s32[] while(%x), condition=%condition, body=%body
    ... }''')
    75
    >>> cycles('''
    ... ENTRY %main (x: f32[4096,1024]) -> f32[4096,1024] {
    ...   %x = f32[4096,1024]{1,0} parameter(0)
    ...   %y = f32[4096,1024]{1,0} fusion(%x), calls=%f, backend_config={"estimated_cycles":"61459"}
    ...   ROOT %z = f32[4096,1024]{1,0} custom-call(%y), custom_call_target="tpu_custom_call"
    ... }''') - 61459
    61455
    """
    bodies = dict(re.findall(COMPUTATION, program))

    @cache
    def count(body: str) -> int:
        total = sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', body)))
        for _, _, operation, rest in _instructions(body):
            if operation == "while":
                total += trips(rest) * count(_called(bodies, rest, "body"))
            elif operation == "conditional":
                total += count(bodies[_usual_branch(rest)])
            elif operation in PROGRAMS:
                total += count(_called(bodies, rest, "to_apply|calls"))
        return total

    def trips(rest: str) -> int:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
        if known:
            return int(known[1])
        # JAX counts the steps of a scan from 0
        condition = _called(bodies, rest, "condition")
        compared = re.search(r"compare\([^)]*\), direction=LT", condition)
        limits = [
            text
            for _, types, operation, text in _instructions(condition)
            if operation == "constant" and types.startswith("s32[]")
        ]
        if not compared or len(limits) != 1:
            raise ValueError(f"cannot tell how often a loop runs: {condition}")
        return int(limits[0].split(")")[0])

    expected = count(_entry(program))
    if PALLAS not in program:
        return expected
    moved = sum(moved for rest, moved in _transfers(program) if PALLAS in rest)
    return round(expected + moved * CLOCK / BANDWIDTH)


def kernels(program: str) -> int:
    """How many a GPU starts."""
    return sum(operation not in FREE for _, _, operation, _ in _instructions(_entry(program)))


def _transfers(program: str, own_body: str = "") -> Iterator[tuple[str, float]]:
    """What follows the name of each operation, and the bytes that it moves in main memory."""
    bodies = dict(re.findall(COMPUTATION, program))
    read = {name: _shares(body) for name, body in bodies.items()}
    # of each name the bytes, and whether they lie there
    arrays: dict[str, list[tuple[int, bool]]] = {}
    for name, types, operation, rest in _instructions(own_body or _entry(program)):
        arrays[name] = own = [_array(*found) for found in ARRAY.findall(types)]
        if operation == "conditional":
            yield from _transfers(program, bodies[_usual_branch(rest)])
        elif operation in PROGRAMS:
            raise ValueError(f"cannot count what {operation} transfers: {name}")
        elif operation in (
            "copy-start",
            "slice-start",
        ):  # (to, from, a flag): the part, if it is one
            yield rest, min(size for size, _ in own[:2])
        elif operation not in FREE:
            called = re.search(r"calls=(%[\w.-]+)", rest)
            shares = read.get(called[1], {}) if called else {}
            moved = float(sum(size for size, there in own if there))
            for place, of in enumerate(_operands(rest)):
                moved += shares.get(place, 1.0) * sum(
                    size for size, there in arrays.get(of, ()) if there
                )
            yield rest, moved


def _called(bodies: dict[str, str], rest: str, keyword: str) -> str:
    """Return the program that an instruction names by a keyword."""
    found = re.search(rf"(?:{keyword})=(%[\w.-]+)", rest)
    assert found is not None, rest
    return bodies[found[1]]


def _usual_branch(rest: str) -> str:
    """Return the name of the branch of a conditional for a predicate that is False."""
    found = re.search(r"(?:branch_computations=\{|false_computation=)(%[\w.-]+)", rest)
    assert found is not None, rest
    return found[1]


def _entry(program: str) -> str:
    return program[program.index("\nENTRY") :]


def _instructions(text: str) -> list[tuple[str, str, str, str]]:
    """The name of each, its types, the operation, and what follows."""
    return [found.groups() for found in map(LINE.match, text.split("\n")) if found]  # type: ignore[misc]


def _operands(rest: str) -> list[str]:
    return re.findall(r"%[\w.-]+", rest.split("), ")[0])


def _array(dtype: str, sizes: str, layout: str) -> tuple[int, bool]:
    return BYTES[dtype] * _elements(sizes), "S(" not in layout


def _elements(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size)


def _shares(body: str) -> dict[int, float]:
    """The share of each parameter of a fusion that it reads: all, unless nothing but slices are
    taken of it.
    """
    sizes, operations, users = {}, {}, defaultdict(list)
    parameters = {}
    for name, types, operation, rest in _instructions(body):
        sizes[name], operations[name] = (
            sum(_elements(found[1]) for found in ARRAY.findall(types)),
            operation,
        )
        if operation == "parameter":
            parameters[int(rest.split(")")[0])] = name
        for of in _operands(rest):
            users[of].append(name)

    def of(name: str) -> int:
        found = 0 if users[name] else sizes[name]
        for user in users[name]:
            if operations[user] == "slice":
                found += sizes[user]
            elif operations[user] in SAME and sizes[user] == sizes[name]:
                found += of(user)
            else:
                return sizes[name]
        return min(found, sizes[name])

    return {place: of(name) / sizes[name] for place, name in parameters.items() if sizes[name]}
