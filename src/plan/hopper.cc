// Work lists for persistent kernels, FA3 and ours: every SM walks its own list of (query tile, head) works.
//
// Longest work first, always onto the least loaded SM. All heads have the same works, which is used twice: SMs and
// heads are cut into as many equal groups as both allow, one group is scheduled and the others repeat it with other
// heads; and within a group the heads of one work arrive together at equal cost, so that the least loaded SM is mostly
// the one that was given work longest ago: a ring kept in order of load takes the place of a heap.
//
// Our own kernel can cut the keys of a tile into parts, each a work, where there are too few tiles for the SMs or the
// last round of them would leave most idle.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/fail.h"
#include "plan/fast_div.h"
#include "plan/planner.h"

namespace fiw {
namespace {

constexpr std::size_t kAlignment = 16;
constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();

// How the rows of a request are cut.
struct Cut {
  std::int32_t tile_rows;
  std::int32_t rows_per_token;
  std::int32_t heads;        ///< that have works of their own
  std::int32_t keys_a_tile;  ///< as long as which loading queries and storing outputs takes

  std::int64_t tiles(std::int32_t qo_len) const noexcept {
    return ceil_div(std::int64_t{qo_len} * rows_per_token, std::int64_t{tile_rows});
  }
};

Cut cut_of(KernelFamily family, const WorkLoad& work, std::int32_t tile_rows) noexcept {
  // Fitted to times of 1 to 16 works a multiprocessor, 8 heads, on an H200; half a block of keys is in it.
  constexpr std::int32_t kTallKeys = 264;
  constexpr std::int32_t kLowKeys = 288;
  if (family == KernelFamily::kPrefill) {
    return {tile_rows, work.group_size(), work.num_kv_heads, tile_rows > 128 ? kTallKeys : kLowKeys};
  }
  return {tile_rows, 1, work.num_qo_heads, 2 * tile_rows};  // FA3 does not pack the heads of a group
}

std::int32_t first_row(const WorkLoad& work, std::int32_t r) noexcept {
  return work.qo_indptr.empty() ? r * work.uniform_qo_len : work.qo_indptr[r];
}

// What every head has to do: one query tile of one request, or one part of its keys.
struct TileWork {
  std::int32_t request;
  std::int32_t tile;
  std::int32_t cost;
  std::int32_t part;
  std::int32_t parts;
  std::int32_t slot;  ///< of the tile's first partial result
};

// Keys that a tile reads, and what else it takes.
std::int32_t tile_cost(const Cut& cut, const WorkLoad& work, std::int32_t qo_len, std::int32_t kv_len,
                       std::int32_t tile) noexcept {
  const std::int64_t rows = cut.tile_rows;
  std::int64_t end = kv_len;
  const std::int64_t last_token = ceil_div((tile + 1) * rows, std::int64_t{cut.rows_per_token});
  if (work.causal) end = std::clamp<std::int64_t>(kv_len - std::int64_t{qo_len} + last_token, 0, kv_len);
  if (work.window_left >= 0) end = std::min(end, work.window_left + ceil_div(rows, std::int64_t{cut.rows_per_token}));
  return static_cast<std::int32_t>(std::min(end + cut.keys_a_tile, kInt32Max));
}

// Keys as long as which a part takes to write its result, fitted to times of 3 to 8 parts a tile on an H200.
constexpr std::int32_t kPartKeys = 130;
constexpr double kAlike = 0.75;  // the least ratio of works that come in rounds

// Which tiles of a kPrefill schedule are cut, and how finely.
struct KeyCut {
  std::int32_t whole_tiles = 0;  ///< of a head, in the order of requests: left whole
  std::int32_t most_keys = std::numeric_limits<std::int32_t>::max();  ///< of a part
};

// The tiles of one request, by counts alone: the length of its keys to the page.
struct RequestTiles {
  std::int32_t tiles;
  std::int32_t whole;  ///< of them, the last ones
  std::int32_t parts;  ///< of each other one
  std::int32_t first;  ///< costs of the first and the last tile, uncut
  std::int32_t last;
};

RequestTiles request_tiles(const Cut& cut, const WorkLoad& work, const KeyCut& keys, std::int32_t r,
                           std::int64_t tiles_before) noexcept {
  const std::int32_t qo_len = work.qo_len(r);
  const auto tiles = static_cast<std::int32_t>(cut.tiles(qo_len));
  if (tiles == 0) return {};
  const auto kv_len = static_cast<std::int32_t>(std::min(std::int64_t{work.kv_pages[r]} * work.page_size, kInt32Max));
  const std::int32_t first = tile_cost(cut, work, qo_len, kv_len, 0);
  const std::int32_t last = tile_cost(cut, work, qo_len, kv_len, tiles - 1);
  const std::int32_t longest = std::max(first, last) - cut.keys_a_tile;
  const auto whole = static_cast<std::int32_t>(std::clamp<std::int64_t>(keys.whole_tiles - tiles_before, 0, tiles));
  return {.tiles = tiles,
          .whole = whole,
          .parts = std::clamp(longest / keys.most_keys + (longest % keys.most_keys != 0), 1, kMostPrefillParts),
          .first = first,
          .last = last};
}

std::int32_t part_cost(const Cut& cut, std::int32_t tile_cost, std::int32_t parts) noexcept {
  return parts == 1 ? tile_cost : (tile_cost - cut.keys_a_tile) / parts + cut.keys_a_tile + kPartKeys;
}

// What the works of a kPrefill schedule come to, without the tiles that are left whole.
struct Outline {
  double works = 0;
  double total = 0;
  double longest = 0;
  double shortest = std::numeric_limits<double>::infinity();
  std::int64_t slots = 0;
  double merge = 0;  // likewise in keys: of the tile that has the most parts

  Outline(const WorkLoad& work, std::int32_t tile_rows, const KeyCut& keys) noexcept {
    constexpr double kTallMergeKeys = 110;
    constexpr double kLowMergeKeys = 220;
    const Cut cut = cut_of(KernelFamily::kPrefill, work, tile_rows);
    std::int64_t before = 0;
    for (std::int32_t r = 0; r < work.batch(); ++r) {
      const RequestTiles request = request_tiles(cut, work, keys, r, before);
      before += request.tiles;
      if (request.tiles == request.whole) continue;
      const double first = part_cost(cut, request.first, request.parts);
      const double last = part_cost(cut, request.last, request.parts);
      const std::int64_t parts = std::int64_t{request.tiles - request.whole} * request.parts * cut.heads;
      works += static_cast<double>(parts);
      total += static_cast<double>(parts) * (first + last) / 2;
      longest = std::max({longest, first, last});
      shortest = std::min({shortest, first, last});
      if (request.parts == 1) continue;
      slots += parts;
      merge = std::max(merge, request.parts * (tile_rows > 128 ? kTallMergeKeys : kLowMergeKeys));
    }
  }

  /// When the last worker ends. Equal works come in rounds; unequal ones leave a remainder that grows with their
  /// spread: in schedules of 2.6 to 16 works a worker it was about this much.
  double finish(std::int32_t workers) const noexcept {
    if (works == 0) return 0;
    const double even = total / workers + 0.4 * (longest - shortest) * workers / works;
    const double in_round = shortest < kAlike * longest ? shortest : (shortest + longest) / 2;
    return std::max({even, std::ceil(works / workers) * in_round, longest}) + merge;
  }
};

struct ChosenCut {
  KeyCut keys{};
  std::int64_t slots = 0;
  double finish = 0;
};

// How to cut the keys, if at all: only where the multiprocessors then end clearly earlier.
ChosenCut choose_keys(const DeviceProps& device, const WorkLoad& work, std::int32_t tile_rows,
                      const SplitPolicy& policy) noexcept {
  constexpr double kMostWorks = 4;            // a worker; the last round of more is short enough
  constexpr std::int32_t kMostRequests = 32;  // whose counts are walked for every candidate
  constexpr std::int32_t kLeastKeys = 512;
  constexpr double kLeastGain = 0.03;
  const std::int32_t workers = device.num_workers;
  const Outline uncut(work, tile_rows, {});
  ChosenCut best{.finish = uncut.finish(workers)};
  if (!policy.allow_split || policy.graph || policy.fixed_chunk_tokens > 0) return best;
  if (work.batch() > kMostRequests) return best;
  if (uncut.works == 0 || uncut.works >= kMostWorks * workers) return best;
  const std::int64_t most_slots =
      std::min(prefill_slots(device),
               static_cast<std::int64_t>(policy.partial_limit / prefill_slot_bytes(tile_rows, work.head_dim_vo)));
  const double most_finish = (1 - kLeastGain) * best.finish;
  const std::int32_t keys = static_cast<std::int32_t>(uncut.longest);
  const auto rounds = static_cast<std::int32_t>(uncut.works / workers);
  const auto consider = [&](std::int32_t whole_tiles, double whole_finish) {
    for (std::int32_t parts = 2; parts <= kMostPrefillParts && keys / parts >= kLeastKeys; ++parts) {
      const KeyCut cut{.whole_tiles = whole_tiles, .most_keys = keys / parts};
      const Outline outline(work, tile_rows, cut);
      if (outline.slots > most_slots) return;
      const double finish = whole_finish + outline.finish(workers);
      if (finish < std::min(best.finish, most_finish)) best = {cut, outline.slots, finish};
    }
  };
  consider(0, 0);
  // Whole rounds of works that are about equal can stay as they are.
  if (rounds > 0 && uncut.shortest >= kAlike * uncut.longest) {
    consider(rounds * workers / work.num_kv_heads, rounds * uncut.longest);
  }
  return best;
}

// The tile height of our prefill kernel with which the multiprocessors end first.
std::int32_t prefill_rows(const DeviceProps& device, const WorkLoad& work, const SplitPolicy& policy) noexcept {
  if (work.head_dim_vo == 64) return 192;
  if (work.head_dim_vo != 128) return 128;
  // Of a row, measured on an H200: low tiles read the keys more often, which costs more where these are many.
  constexpr double kLowSlowness = 1.04;
  constexpr double kLowSlownessOfLong = 1.05;
  const ChosenCut tall = choose_keys(device, work, 192, policy);
  const ChosenCut low = choose_keys(device, work, 128, policy);
  const double slowness = tall.slots > 0 ? kLowSlownessOfLong : kLowSlowness;
  return 192 * tall.finish <= slowness * 128 * low.finish ? 192 : 128;
}

// All tiles, or their parts, in descending cost up to 1/256 of the largest: a counting sort, stable, so equal inputs
// give equal lists.
void sort_tiles(const Cut& cut, const WorkLoad& work, const KeyCut& keys, std::span<const std::int32_t> kv_lens,
                std::span<TileWork> unsorted, std::span<TileWork> sorted) noexcept {
  std::size_t count = 0;
  std::int32_t largest = 1;
  std::int32_t slot = 0;
  std::int64_t before = 0;
  for (std::int32_t r = 0; r < work.batch(); ++r) {
    const RequestTiles request = request_tiles(cut, work, keys, r, before);
    before += request.tiles;
    for (std::int32_t tile = request.tiles - 1; tile >= 0; --tile) {
      const std::int32_t parts = tile >= request.tiles - request.whole ? 1 : request.parts;
      const std::int32_t cost = part_cost(cut, tile_cost(cut, work, work.qo_len(r), kv_lens[r], tile), parts);
      for (std::int32_t part = 0; part < parts; ++part) unsorted[count++] = {r, tile, cost, part, parts, slot};
      if (parts > 1) slot += parts;
      largest = std::max(largest, cost);
    }
  }
  const int shift = std::max(0, static_cast<int>(std::bit_width(static_cast<std::uint32_t>(largest))) - 8);
  std::array<std::int32_t, 257> starts{};
  const auto bucket = [shift](const TileWork& item) { return 255 - (item.cost >> shift); };
  for (const TileWork& item : unsorted) ++starts[bucket(item) + 1];
  std::partial_sum(starts.begin(), starts.end(), starts.begin());
  for (const TileWork& item : unsorted) sorted[starts[bucket(item)]++] = item;
}

// SMs in order of load. The least loaded is at the front; one that gets more work nearly always belongs at the back.
class LoadRing {
 public:
  struct Entry {
    std::int64_t load;
    std::int32_t worker;
  };

  explicit LoadRing(std::span<Entry> storage) noexcept : ring_(storage), mask_(storage.size() - 1) {}

  /// Gives `cost` to the least loaded worker and returns it.
  std::int32_t assign(std::int32_t cost, std::size_t workers) noexcept {
    Entry entry = ring_[front_++ & mask_];
    entry.load += cost;
    std::size_t at = front_ + workers - 1;
    while (at > front_ && ring_[(at - 1) & mask_].load > entry.load) {
      ring_[at & mask_] = ring_[(at - 1) & mask_];
      --at;
    }
    ring_[at & mask_] = entry;
    return entry.worker;
  }

 private:
  std::span<Entry> ring_;  // a power of two
  std::size_t mask_;
  std::size_t front_ = 0;
};

// Whether heads may come one after the other: fewer keys are then read at a time, and more of them from the cache
// (16 x 512 tokens 96 us instead of 102, on an H200). The last head's works have to be short enough to even out the
// rest.
bool many_short(std::span<const TileWork> sorted, std::int32_t heads, std::int32_t workers) noexcept {
  constexpr std::int64_t kLeastShare = 5;
  std::int64_t total = 0;
  for (const TileWork& item : sorted) total += item.cost;
  return !sorted.empty() && kLeastShare * sorted.front().cost * workers <= total * heads;
}

}  // namespace

std::int64_t prefill_slots(const DeviceProps& device) noexcept { return std::int64_t{3} * device.num_workers; }

std::size_t prefill_slot_bytes(std::int32_t tile_rows, std::int32_t head_dim_vo) noexcept {
  // A lane in four of a row adds its share of the sum, and the largest score.
  return static_cast<std::size_t>(tile_rows) * (static_cast<std::size_t>(head_dim_vo) + 8) * sizeof(float);
}

std::int32_t hopper_tile_rows(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                              const SplitPolicy& policy) noexcept {
  if (family == KernelFamily::kPrefill) return prefill_rows(device, work, policy);
  return work.head_dim_vo < 128 ? 192 : 128;
}

HopperShape shape_hopper(KernelFamily family, std::int32_t tile_rows, const DeviceProps& device, const WorkLoad& work,
                         const SplitPolicy& policy) {
  if (work.total_rows() > kInt32Max) {
    fail(Reason::kSizeOverflow, "the number of query rows is {}, which does not fit 32 bits", work.total_rows());
  }
  HopperShape shape;
  const Cut cut = cut_of(family, work, tile_rows);
  ChosenCut chosen;
  if (family == KernelFamily::kPrefill) chosen = choose_keys(device, work, tile_rows, policy);
  std::int64_t works = 0;
  std::int64_t tiles = 0;
  for (std::int32_t r = 0; r < work.batch(); ++r) {
    const RequestTiles request = request_tiles(cut, work, chosen.keys, r, tiles);
    tiles += request.tiles;
    works += request.whole + std::int64_t{request.tiles - request.whole} * request.parts;
  }
  std::int64_t padded = works;
  if (policy.graph) {
    const std::int64_t batch = policy.max_batch > 0 ? policy.max_batch : work.batch();
    if (work.batch() > batch) {
      fail(Reason::kBatch, "the batch has {} requests, the graph was sized for {}", work.batch(), batch);
    }
    padded = work.qo_indptr.empty()
                 ? batch * cut.tiles(work.uniform_qo_len)
                 : (work.total_rows() * cut.rows_per_token + batch * (cut.tile_rows - 1)) / cut.tile_rows;
  }
  const std::int64_t heads = cut.heads;
  if (padded * heads > kInt32Max) {
    fail(Reason::kSizeOverflow, "the number of works is {}, which does not fit 32 bits", padded * heads);
  }
  shape.works = static_cast<std::int32_t>(works * heads);
  shape.padded_works = static_cast<std::int32_t>(padded * heads);

  const auto place = [&](std::int64_t elements) {
    const std::size_t offset = shape.bytes;
    shape.bytes +=
        (static_cast<std::size_t>(elements) * sizeof(std::int32_t) + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  };
  shape.qo_tile_indices = place(shape.padded_works);
  shape.qo_indptr = place(shape.padded_works);
  shape.kv_indptr = place(shape.padded_works);
  shape.qo_len = place(shape.padded_works);
  shape.kv_len = place(shape.padded_works);
  shape.head_indices = place(shape.padded_works);
  shape.work_indptr = place(std::int64_t{device.num_workers} + 1);
  shape.batch_indices = place(shape.padded_works);
  if (chosen.slots > 0) {
    shape.whole_tiles = chosen.keys.whole_tiles;
    shape.most_part_keys = chosen.keys.most_keys;
    shape.slots = static_cast<std::int32_t>(chosen.slots);
    shape.part_indices = place(works * heads);
    shape.parts = place(works * heads);
    shape.slot_indices = place(works * heads);
    shape.arrivals = place(chosen.slots * (tile_rows / kPrefillWarpRows));
  }
  return shape;
}

void write_hopper(KernelFamily family, std::int32_t tile_rows, const HopperShape& shape, const DeviceProps& device,
                  const WorkLoad& work, std::span<const std::int32_t> kv_indptr, std::span<const std::int32_t> kv_lens,
                  std::vector<std::byte>& scratch, std::span<std::byte> out) {
  if (out.size() < shape.bytes) {
    throw Error(Status::kInternal, Reason::kBug, "the memory for a schedule is smaller than its shape");
  }
  const Cut cut = cut_of(family, work, tile_rows);
  const std::int32_t heads = cut.heads;
  const std::int32_t groups = std::gcd(device.num_workers, heads);
  const std::int32_t group_heads = heads / groups;
  const std::int32_t group_workers = device.num_workers / groups;
  const std::int32_t tiles = shape.works / heads;
  const std::int32_t group_works = shape.works / groups;

  // Bounded by the works of a group.
  const std::size_t ring_slots = std::bit_ceil(static_cast<std::size_t>(group_workers));
  const std::size_t word_count = static_cast<std::size_t>(group_workers) + 1 + group_works;
  const std::size_t tile_bytes = 2 * static_cast<std::size_t>(tiles) * sizeof(TileWork);
  const std::size_t ring_bytes = ring_slots * sizeof(LoadRing::Entry);
  static_assert(alignof(TileWork) <= alignof(LoadRing::Entry) && alignof(std::int32_t) <= alignof(TileWork));
  scratch.resize(std::max(scratch.size(), tile_bytes + ring_bytes + word_count * sizeof(std::int32_t)));
  auto* const tile_works = reinterpret_cast<TileWork*>(scratch.data() + ring_bytes);
  const std::span<TileWork> unsorted(tile_works, static_cast<std::size_t>(tiles));
  const std::span<TileWork> sorted(tile_works + tiles, static_cast<std::size_t>(tiles));
  const bool parted = shape.slots > 0;
  const KeyCut keys = parted ? KeyCut{.whole_tiles = shape.whole_tiles, .most_keys = shape.most_part_keys} : KeyCut{};
  sort_tiles(cut, work, keys, kv_lens, unsorted, sorted);

  const std::span<LoadRing::Entry> ring_storage(reinterpret_cast<LoadRing::Entry*>(scratch.data()), ring_slots);
  std::ranges::fill(ring_storage, LoadRing::Entry{});
  for (std::int32_t w = 0; w < group_workers; ++w) ring_storage[w] = {.load = 0, .worker = w};
  LoadRing ring(ring_storage);
  const auto workers = static_cast<std::size_t>(group_workers);
  const std::span<std::int32_t> words(reinterpret_cast<std::int32_t*>(scratch.data() + ring_bytes + tile_bytes),
                                      word_count);
  // Where each worker's next work goes: at first how many it has, one entry further on, which is then summed.
  const std::span<std::int32_t> places = words.first(workers + 1);
  const std::span<std::int32_t> worker_of = words.subspan(workers + 1);  // [works of the group]
  std::ranges::fill(places, 0);
  // Calls f(tile, first head, end of heads), in the order in which works are given out.
  const bool by_head = family == KernelFamily::kPrefill && many_short(sorted, group_heads, group_workers);
  const auto for_each_run = [&](const auto& f) {
    if (!by_head) {
      for (const TileWork& item : sorted) f(item, 0, group_heads);
      return;
    }
    for (std::int32_t h = 0; h < group_heads; ++h) {
      for (const TileWork& item : sorted) f(item, h, h + 1);
    }
  };
  std::size_t id = 0;
  for_each_run([&](const TileWork& item, std::int32_t first, std::int32_t end) {
    for (std::int32_t h = first; h < end; ++h) {
      const std::int32_t worker = ring.assign(item.cost, workers);
      worker_of[id++] = worker;
      ++places[worker + 1];
    }
  });
  std::partial_sum(places.begin(), places.end(), places.begin());

  const auto array = [&](std::size_t offset) { return reinterpret_cast<std::int32_t*>(out.data() + offset); };
  std::int32_t* const qo_tile = array(shape.qo_tile_indices);
  std::int32_t* const qo_start = array(shape.qo_indptr);
  std::int32_t* const kv_start = array(shape.kv_indptr);
  std::int32_t* const qo_len = array(shape.qo_len);
  std::int32_t* const kv_len = array(shape.kv_len);
  std::int32_t* const head = array(shape.head_indices);
  std::int32_t* const work_indptr = array(shape.work_indptr);
  std::int32_t* const request = array(shape.batch_indices);
  std::int32_t* const part = array(shape.part_indices);
  std::int32_t* const parts = array(shape.parts);
  std::int32_t* const slot = array(shape.slot_indices);
  std::copy_n(places.begin(), group_workers, work_indptr);
  id = 0;
  for_each_run([&](const TileWork& item, std::int32_t first, std::int32_t end) {
    const std::int32_t row = first_row(work, item.request);
    const std::int32_t rows = work.qo_len(item.request);
    const std::int32_t key = kv_indptr[item.request];
    const std::int32_t kv = kv_lens[item.request];
    for (std::int32_t h = first; h < end; ++h) {
      const std::int32_t at = places[worker_of[id++]]++;
      qo_tile[at] = item.tile;
      qo_start[at] = row;
      kv_start[at] = key;
      qo_len[at] = rows;
      kv_len[at] = kv;
      head[at] = h;
      request[at] = item.request;
      if (!parted) continue;
      part[at] = item.part;
      parts[at] = item.parts;
      slot[at] = h * (shape.slots / heads) + item.slot;
    }
  });
  for (std::int32_t g = 1; g < groups; ++g) {
    const std::int32_t begin = g * group_works;
    for (std::int32_t* const same : {qo_tile, qo_start, kv_start, qo_len, kv_len, request}) {
      std::copy_n(same, group_works, same + begin);
    }
    for (std::int32_t i = 0; i < group_works; ++i) head[begin + i] = head[i] + g * group_heads;
    if (parted) {
      std::copy_n(part, group_works, part + begin);
      std::copy_n(parts, group_works, parts + begin);
      const std::int32_t slots = shape.slots / groups;
      for (std::int32_t i = 0; i < group_works; ++i) slot[begin + i] = slot[i] + g * slots;
    }
    for (std::int32_t w = 0; w < group_workers; ++w) work_indptr[g * group_workers + w] = work_indptr[w] + begin;
  }

  // Padding is never reached; it is written so that equal work gives equal bytes.
  const auto pad = [&](std::size_t offset, std::int32_t used, std::int32_t capacity, std::int32_t value) {
    const std::int32_t padded = (capacity + 3) / 4 * 4;
    std::fill(array(offset) + used, array(offset) + padded, value);
  };
  for (const std::size_t offset : {shape.qo_tile_indices, shape.qo_indptr, shape.kv_indptr, shape.qo_len, shape.kv_len,
                                   shape.head_indices, shape.batch_indices}) {
    pad(offset, shape.works, shape.padded_works, 0);
  }
  if (parted) {
    for (const std::size_t offset : {shape.part_indices, shape.parts, shape.slot_indices}) {
      pad(offset, shape.works, shape.works, 0);
    }
    pad(shape.arrivals, 0, shape.slots * (tile_rows / kPrefillWarpRows), 0);
  }
  pad(shape.work_indptr, device.num_workers, device.num_workers + 1, shape.works);
}

}  // namespace fiw
