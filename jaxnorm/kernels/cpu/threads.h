// Tasks on XLA's threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "ffi.h"

constexpr int kPolls = 100;  // before a thread sleeps: waking it takes longer than most of what it waits for

// Runs tasks on the caller's thread and on those of XLA's pool that are free. The caller waits only for tasks that
// have begun, so that a pool whose threads all wait cannot stand still.
inline void run_in_parallel(ffi::ThreadPool& pool, int64_t tasks, std::function<void(int64_t)> run) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  const int64_t helpers = std::min(pool.num_threads(), tasks) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < tasks; ++i) run(i);
    return;
  }
  auto state = std::make_shared<State>();
  auto work = [state, tasks, &run] {  // run is called only while there are tasks, and so while the caller waits
    for (int64_t i; (i = state->next++) < tasks;) {
      run(i);
      if (++state->done == tasks) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->finished.notify_all();
      }
    }
  };
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(std::function<void()>(work));
  work();
  for (int poll = 0; poll < kPolls && state->done != tasks; ++poll) std::this_thread::yield();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done == tasks; });
}
