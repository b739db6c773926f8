// Sums in vector registers: a few elements in float32, whose sums are added in double.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#ifdef __AVX512F__
constexpr int64_t kTile = 64;  // columns, at most, whose partial sums stay in registers
#else
constexpr int64_t kTile = 32;
#endif
constexpr int64_t kStrip = 512;          // columns, at most, of one call of column_sums
constexpr int64_t kFloatRows = 16;       // rows that are added in float32
constexpr int64_t kWays = 32;            // partial sums of a row, to which elements are added in turn
constexpr int64_t kFloatElements = 512;  // elements of a row that are added in float32

// Neighbouring rows of an array.
struct Run {
  int32_t first, end;
};

// Some rows of an array, in order: those whose elements are added.
struct Rows {
  const Run *runs, *runs_end;
  int64_t count;  // how many rows

  const Run* begin() const { return runs; }
  const Run* end() const { return runs_end; }

  // Calls take(row) for each of these, and leave(row) for each other of all rows.
  template <typename Take, typename Leave>
  void split(int64_t all, Take take, Leave leave) const {
    int64_t row = 0;
    for (const Run& run : *this) {
      for (; row < run.first; ++row) leave(row);
      for (; row < run.end; ++row) take(row);
    }
    for (; row < all; ++row) leave(row);
  }
};

// Calls of_tile(first column, columns) for all columns in tiles; but for the last the compiler knows how many they are.
template <typename OfTile>
void over_tiles(int64_t columns, OfTile of_tile) {
  int64_t first = 0;
  for (; first + kTile <= columns; first += kTile) of_tile(first, std::integral_constant<int64_t, kTile>{});
  for (; first + 16 <= columns; first += 16) of_tile(first, std::integral_constant<int64_t, 16>{});
  if (first < columns) of_tile(first, columns - first);
}

// `count` sums over some rows for each of up to kStrip columns: add(row, column, place, partial) adds an element's
// terms to partial[0][place], partial[1][place], ...
template <int count, typename Add>
void column_sums(const Rows& rows, int64_t columns, double (&sums)[count][kStrip], Add add) {
  for (auto& sum : sums) std::fill(sum, sum + columns, 0.0);
  for (const Run& run : rows)
    for (int64_t start = run.first; start < run.end; start += kFloatRows) {
      const int64_t end = std::min<int64_t>(run.end, start + kFloatRows);
      over_tiles(columns, [&](int64_t first, auto width) {
        float partial[count][kTile] = {};
        for (int64_t row = start; row < end; ++row)
#pragma omp simd
          for (int64_t j = 0; j < width; ++j) add(row, first + j, j, partial);
        for (int k = 0; k < count; ++k)
          for (int64_t j = 0; j < width; ++j) sums[k][first + j] += partial[k][j];
      });
    }
}

// In pairs: a compiler adds up a vector element by element, each time waiting for the last.
template <int64_t count>
[[gnu::always_inline]] inline float pairwise_sum(float* values) {
  if constexpr (count == 1) return *values;
  constexpr int64_t half = count / 2;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
  return pairwise_sum<count == 1 ? 1 : half>(values);
}

// Adds the elements from i to end, in blocks of `ways`, and returns where the last block ends.
template <int64_t ways, int count, typename Add>
[[gnu::always_inline]] inline int64_t add_blocks(int64_t i, int64_t end, double (&sums)[count], Add add) {
  if (i + ways > end) return i;
  float partial[count][ways] = {};
  do {  // once at least, which lets compilers keep the sums in registers
#pragma omp simd
    for (int64_t way = 0; way < ways; ++way) add(i + way, way, partial);
    i += ways;
  } while (i + ways <= end);
  for (int k = 0; k < count; ++k) sums[k] += pairwise_sum<ways>(partial[k]);
  return i;
}

// `count` sums over the d elements of a row: add(i, way, partial) adds the terms of element i to partial[0][way], ...
template <int count, typename Add>
[[gnu::always_inline]] inline void row_sums(int64_t d, double (&sums)[count], Add add) {
  std::fill(sums, sums + count, 0.0);
  for (int64_t start = 0; start < d; start += kFloatElements) {
    const int64_t end = std::min(d, start + kFloatElements);
    const int64_t rest = add_blocks<8>(add_blocks<kWays>(start, end, sums, add), end, sums, add);
    add_blocks<1>(rest, end, sums, add);
  }
}
