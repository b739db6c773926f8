// Work on arrays with several positions: chunks of positions that stay in the cache while they are read twice, and
// stages of which each begins when the one before has ended. The order of sums does not depend on the number of
// threads.
#pragma once

#include <type_traits>
#include <vector>

#include "shape.h"
#include "sums.h"
#include "threads.h"

constexpr int64_t kChunk = 16384;              // elements that are read twice: 64 KiB of float32
constexpr int64_t kMostForOneThread = 262144;  // elements of an example, up to which one thread takes all of it

// The positions of an example in chunks, and those of them that count.
class Chunks {
 public:
  int64_t rows, count;  // positions of each chunk but the last; how many chunks
  bool one_thread_per_example;

  Chunks(const Shape& shape, const Mask& mask, int64_t threads) : per_mask_(mask.per_mask) {
    rows = std::max<int64_t>(64, kChunk / shape.channels());
    count = (shape.p + rows - 1) / rows;
    one_thread_per_example = shape.n >= 2 * threads && shape.p * shape.channels() <= kMostForOneThread;
    for (int64_t n = 0; n < shape.n; n += per_mask_)
      for (int64_t k = 0; k < count; ++k) add(size(shape, k), mask.values ? mask.of_example(n) + k * rows : nullptr);
  }
  int64_t size(const Shape& shape, int64_t chunk) const { return std::min(rows, shape.p - chunk * rows); }
  // Where a chunk begins in x.
  int64_t start(const Shape& shape, int64_t n, int64_t chunk) const {
    return (n * shape.p + chunk * rows) * shape.channels();
  }
  // Those that count, by their place in the chunk.
  Rows unmasked(int64_t n, int64_t chunk) const {
    const Part& part = parts_[n / per_mask_ * count + chunk];
    return {runs_.data() + part.first_run, runs_.data() + part.end_run, part.positions};
  }
  // How many elements of each group of an example count.
  double group_size(const Shape& shape, int64_t n) const {
    int64_t positions = 0;
    for (int64_t k = 0; k < count; ++k) positions += unmasked(n, k).count;
    return double(positions * shape.d);
  }

 private:
  struct Part {
    int64_t first_run, end_run, positions;
  };

  // Appends a chunk of so many positions, of which a mask hides some.
  void add(int64_t size, const bool* mask) {
    Part part{int64_t(runs_.size()), 0, 0};
    auto next = [&](int64_t from, bool counts) {  // the first position from there on that counts, or does not
      return mask ? std::find(mask + from, mask + size, counts) - mask : counts ? from : size;
    };
    for (int64_t first = next(0, true), end; first < size; first = next(end, true)) {
      end = next(first, false);
      runs_.push_back({int32_t(first), int32_t(end)});
      part.positions += end - first;
    }
    part.end_run = int64_t(runs_.size());
    parts_.push_back(part);
  }

  int64_t per_mask_;  // examples that share a mask
  std::vector<Run> runs_;
  std::vector<Part> parts_;  // of each mask and chunk
};

template <typename Stage, typename State>
constexpr bool is_of_chunks = std::is_invocable_v<Stage, State&, int64_t, int64_t>;

// Runs the stages in turn: those of chunks, stage(state, n, chunk), and those of examples, stage(state, n). In the
// state, which make() makes for each example, they leave each other what they computed.
template <typename Make, typename... Stage>
void run_stages(ffi::ThreadPool& pool, const Shape& shape, const Chunks& chunks, Make make, Stage... stage) {
  using State = decltype(make());
  const int64_t count = chunks.count;
  if (chunks.one_thread_per_example) {
    auto run = [&](auto& stage, State& state, int64_t n) {
      if constexpr (!is_of_chunks<decltype(stage), State>) stage(state, n);
      else
        for (int64_t k = 0; k < count; ++k) stage(state, n, k);
    };
    return run_in_parallel(pool, shape.n, [&](int64_t n) {
      State state = make();
      (run(stage, state, n), ...);
    });
  }
  std::vector<State> states;
  for (int64_t n = 0; n < shape.n; ++n) states.push_back(make());
  auto run = [&](auto& stage) {
    if constexpr (!is_of_chunks<decltype(stage), State>)
      run_in_parallel(pool, shape.n, [&](int64_t n) { stage(states[n], n); });
    else run_in_parallel(pool, shape.n * count, [&](int64_t i) { stage(states[i / count], i / count, i % count); });
  };
  (run(stage), ...);
}
