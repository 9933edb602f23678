// Groups routed slots by expert, and cuts the work on them into tasks.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "../check.h"
#include "moe.h"
#include "workspace.h"

namespace mxfp4::cpu {

constexpr int32_t kSkip = -1;  // expert id of a slot that contributes nothing

// Up to kMaxRows slots that use one expert and the same kernels.
struct Group {
    int64_t expert;
    Path path;
    const int64_t* slots;
    int64_t count;
};

struct TileRange {
    int64_t group, begin, end;
};

// Counting sort by (expert, path), stable, so that the order in a group follows from the inputs alone.
// path_of(slot) -> Path; order [slots] is filled and the groups point into it.
template <class PathOf>
std::vector<Group> group_slots(const MoeArgs& args, PathOf path_of, int64_t* order) {
    const int64_t slots = args.tokens * args.top_k;
    const auto key_of = [&](int64_t slot) {
        return args.topk_ids[slot] * int64_t{kPaths} + static_cast<int>(path_of(slot));
    };
    std::vector<int64_t> end(static_cast<size_t>(args.experts * kPaths) + 1, 0);
    for (int64_t slot = 0; slot < slots; slot++) {
        if (args.topk_ids[slot] == kSkip) continue;
        MX_CHECK(args.topk_ids[slot] >= 0 && args.topk_ids[slot] < args.experts, "expert id out of range");
        end[static_cast<size_t>(key_of(slot)) + 1]++;
    }
    for (size_t key = 1; key < end.size(); key++) end[key] += end[key - 1];
    // end[key] is the first place of this key now, and its end after the next loop.
    for (int64_t slot = 0; slot < slots; slot++) {
        if (args.topk_ids[slot] != kSkip) order[end[static_cast<size_t>(key_of(slot))]++] = slot;
    }
    std::vector<Group> groups;
    int64_t begin = 0;
    for (int64_t key = 0; key < args.experts * kPaths; key++) {
        const int64_t stop = end[static_cast<size_t>(key)];
        for_even_parts(stop - begin, kMaxRows, [&](int64_t first, int64_t count) {
            groups.push_back({key / kPaths, static_cast<Path>(key % kPaths), order + begin + first, count});
        });
        begin = stop;
    }
    return groups;
}

// Runs of tiles: long enough to read memory in streams, and ever shorter towards the end, so that all threads end
// together. Even where they can be, because kernels read two tiles side by side.
inline std::vector<TileRange> split_tiles(const std::vector<Group>& groups, int64_t tiles, int64_t threads) {
    constexpr int64_t kRunsPerThread = 4;  // that the tiles left at any point should still make
    int64_t left = static_cast<int64_t>(groups.size()) * tiles;
    const int64_t shortest = left >= 16 * threads ? 2 : 1;
    std::vector<TileRange> tasks;
    for (size_t group = 0; group < groups.size(); group++) {
        for (int64_t begin = 0; begin < tiles;) {
            const int64_t run = std::clamp(left / (threads * kRunsPerThread) / 2 * 2, shortest, kLongestRun);
            const int64_t end = std::min(begin + run, tiles);
            tasks.push_back({static_cast<int64_t>(group), begin, end});
            left -= end - begin;
            begin = end;
        }
    }
    return tasks;
}

}  // namespace mxfp4::cpu
