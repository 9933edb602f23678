// Runs independent tasks on the caller's threads; a free thread takes the next task from an atomic counter.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <atomic>

#include "moe.h"

namespace mxfp4::cpu {

// Calls body(thread, task) for every task in [0, tasks), thread < threads.count. `work` (elements or bytes touched)
// decides whether waking threads is worth it; starting a parallel region costs about as much as 64 Ki of them.
template <class Body>
void parallel_tasks(const Threads& threads, int64_t tasks, int64_t work, Body body) {
    constexpr int64_t kWorthwhile = 64 * 1024;
    const int64_t count = work < kWorthwhile ? 1 : std::min(threads.count, tasks);
    if (count <= 1) {
        for (int64_t task = 0; task < tasks; task++) body(0, task);
        return;
    }
    std::atomic<int64_t> next{0};
    threads.run(count, [&](int64_t thread) {
        for (int64_t task = next++; task < tasks; task = next++) body(thread, task);
    });
}

}  // namespace mxfp4::cpu
