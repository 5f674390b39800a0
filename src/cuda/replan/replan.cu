// One block a kind of layer. All threads look at the table, then all seek the chunk, then all write. What takes time
// here is waiting, not work: loads are under way before they are needed, nothing is divided by a number but by its
// reciprocal, and the chunk is sought among many candidates at once instead of by halves. Most of all it waits for its
// own instructions, each of which runs but a few times: so loops are not unrolled, and what only a bad table needs lies
// apart. The result is that of the planners on the host, entry for entry.
#include "cuda/launch.cuh"
#include "cuda/replan/replan.h"
#include "plan/chunk_search.h"
#include "plan/live_table.h"

namespace fiw::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;
static_assert(kMostRequests <= 2 * kThreads && kMostRequests <= kWarp * kWarp && kWarps <= kWarp);

/// A schedule in memory; see ScheduleShape.
struct Schedule {
  std::int32_t* request_indices;
  std::int32_t* qo_tile_indices;
  std::int32_t* kv_tile_indices;
  std::int32_t* o_indptr;
  std::int32_t* merge_indptr;
  std::int32_t* kv_chunk_size;
  std::int32_t* total_num_rows;
  std::int32_t* arrivals;
  std::uint8_t* block_valid;
  std::int32_t padded_items;
  std::int32_t counted;  ///< arrivals
};

struct Part {
  Schedule schedule;
  DevicePlan plan;
};

struct Args {
  LiveTable table;
  std::int32_t* kv_lens;
  std::int32_t* prepared;
  const std::int32_t* prepared_indptr;
  GraphAlarm* alarm;
  std::int32_t batch;
  std::int32_t num_parts;
  Part parts[kMostParts];
};

/// Division of many numbers below 2^31 by one.
class Divisor {
 public:
  __device__ explicit Divisor(std::int32_t divisor)
      : divisor_(static_cast<unsigned>(divisor)), reciprocal_(0xFFFFFFFFU / divisor_) {}

  __device__ std::int32_t floor(std::int32_t n) const {
    const auto dividend = static_cast<unsigned>(n);
    const unsigned quotient = __umulhi(dividend, reciprocal_);  // short by one at most
    return static_cast<std::int32_t>(quotient + (dividend - quotient * divisor_ >= divisor_ ? 1 : 0));
  }

 private:
  unsigned divisor_;
  unsigned reciprocal_;
};

/// What requests walk: those of a warp, or all.
struct Totals {
  unsigned pages;
  unsigned spared;
  std::int32_t longest;
};

/// The sums of what every lane has.
__device__ Totals warp_totals(const Totals& lane) {
  return {.pages = __reduce_add_sync(kAllLanes, lane.pages),
          .spared = __reduce_add_sync(kAllLanes, lane.spared),
          .longest = __reduce_max_sync(kAllLanes, lane.longest)};
}

/// The search for a chunk, by the whole block. A lane has a candidate and its warp some of the requests. The first
/// round tries 32 chunks for all limits, the second those between the last one too short and the first good one of each
/// limit.
class ChunkSearch {
 public:
  static constexpr int kCounts = (1 + ChunkRule::kLimits) * kWarp;  ///< of chunks, zeros in shared memory at first

  /// `rest` are the pages that each request walks beyond one, with zeros behind up to a multiple of 4.
  __device__ ChunkSearch(const DevicePlan& plan, const std::int32_t* rest, std::int32_t batch, std::int32_t longest,
                         unsigned* counts)
      : plan_(plan),
        rest_(reinterpret_cast<const int4*>(rest)),
        fours_((batch + 3) / 4),
        batch_(batch),
        least_(plan.rule.least_chunk(longest)),
        longest_(longest),
        counts_(counts) {}

  __device__ std::int32_t choose(const Totals& totals) {
    if (longest_ <= least_) return longest_;
    const std::int32_t begin = chunk_index(least_);
    const std::int32_t stride = (chunk_index(longest_) + 1 - begin) / kWarp + 1;
    std::int32_t found[ChunkRule::kLimits];
    const auto warp = static_cast<int>(threadIdx.x) / kWarp;
    const auto lane = static_cast<int>(threadIdx.x) % kWarp;
    count(begin + (lane + 1) * stride - 1, warp, kWarps, counts_ + lane);
    __syncthreads();
    const unsigned all = counts_[lane];
    const std::int32_t uncut = batch_;
#pragma unroll
    for (int i = 0; i < ChunkRule::kLimits; ++i) {
      found[i] = begin + first_of(__ballot_sync(kAllLanes, all <= plan_.most_chunks[i] - uncut)) * stride;
    }
    // Where few candidates are left, a warp has those of all limits.
    const int each = stride <= kFew ? kFew : kWarp;
    const bool few = each == kFew;
    const int limit = min(few ? lane / kFew : warp % ChunkRule::kLimits, ChunkRule::kLimits - 1);
    const int step = few ? lane - limit * kFew : lane;
    const int from = limit == 0 ? found[0] : limit == 1 ? found[1] : found[2];
    const int sharing = few ? kWarps : kWarps / ChunkRule::kLimits;
    const int share = few ? warp : warp / ChunkRule::kLimits;
    if (share < sharing) count(from + step, share, sharing, counts_ + kWarp + limit * each + step);
    __syncthreads();
    const unsigned mask = kAllLanes >> (kWarp - each);
#pragma unroll
    for (int i = 0; i < ChunkRule::kLimits; ++i) {
      const unsigned chunks = counts_[kWarp + i * each + lane];
      found[i] += first_of(__ballot_sync(kAllLanes, chunks <= plan_.most_chunks[i] - uncut) & mask);
    }
    const auto shortest = [&](int i) { return chunk_at(i == 0 ? found[0] : i == 1 ? found[1] : found[2]); };
    const double tiles = plan_.tiles;
    return choose_chunk(shortest, {.visible_pages = tiles * (totals.pages - 0.5 * totals.spared), .longest = longest_},
                        least_, plan_.rule);
  }

 private:
  static constexpr int kFew = 10;
  static_assert(kFew * ChunkRule::kLimits <= kWarp && ChunkRule::kLimits <= kWarps);

  /// Adds the chunks beyond one of every `sharing`-th four requests.
  __device__ void count(std::int32_t candidate, int share, int sharing, unsigned* sum) const {
    const Divisor by(chunk_at(candidate));
    unsigned chunks = 0;
#pragma unroll 1
    for (std::int32_t i = share; i < fours_; i += sharing) {
      const int4 four = rest_[i];
      chunks += static_cast<unsigned>(by.floor(four.x) + by.floor(four.y) + by.floor(four.z) + by.floor(four.w));
    }
    atomicAdd(sum, chunks);
  }
  __device__ std::int32_t chunk_at(std::int32_t index) const { return nth_chunk(index, least_, longest_); }
  __device__ static std::int32_t first_of(unsigned lanes) { return __ffs(static_cast<int>(lanes)) - 1; }

  const DevicePlan& plan_;
  const int4* rest_;
  std::int32_t fours_;
  std::int32_t batch_;
  std::int32_t least_;
  std::int32_t longest_;
  unsigned* counts_;
};

/// Writes the chunks before each request, and their total behind them; by the whole block, each thread two requests.
__device__ void sum_chunks(const std::int32_t* rest, std::int32_t batch, std::int32_t chunk_pages,
                           std::int32_t* warp_sums, std::int32_t* first_chunk) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const std::int32_t r = 2 * static_cast<std::int32_t>(threadIdx.x);
  const bool busy = 2 * kWarp * warp < batch;
  std::int32_t two = 0;
  std::int32_t sum = 0;
  if (busy) {
    const Divisor by(chunk_pages);
    two = r + 1 < batch ? by.floor(rest[r + 1]) + 1 : 0;
    sum = two + (r < batch ? by.floor(rest[r]) + 1 : 0);
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::int32_t before = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += before;
    }
  }
  if (batch > 2 * kWarp) {
    if (lane == kWarp - 1) warp_sums[warp] = sum;
    __syncthreads();
    sum += __reduce_add_sync(kAllLanes, lane < warp ? warp_sums[lane] : 0);
  }
  if (r < batch) first_chunk[r + 1] = sum - two;
  if (r + 1 < batch) first_chunk[r + 2] = sum;
  if (r == 0) first_chunk[0] = 0;
  __syncthreads();
}

/// The page ids of a table, sixteen bytes at a time: a thread's first ones are on their way from when this is made.
class PageScan {
 public:
  __device__ PageScan(const LiveTable& table, std::int32_t entries)
      : pages_(table.indices), num_pages_(table.num_pages), entries_(entries) {
    const auto misaligned = static_cast<std::int32_t>(reinterpret_cast<std::uintptr_t>(pages_) / sizeof(int) % kWide);
    head_ = min((kWide - misaligned) % kWide, entries_);
    wide_ = (entries_ - head_) / kWide;
    load(0);
  }

  /// Whether this thread sees an id that is none of the cache's pages.
  __device__ bool any_bad() {
    unsigned largest = 0;  // of negative ones, too
#pragma unroll 1
    for (std::int32_t base = 0;; load(base)) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        largest = max(largest, max(max(ahead_[i].x, ahead_[i].y), max(ahead_[i].z, ahead_[i].w)));
      }
      base += kAtOnce * kThreads;
      if (base >= wide_) break;
    }
    // What lies before the first and behind the last sixteen bytes.
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (thread < head_) largest = max(largest, static_cast<unsigned>(pages_[thread]));
    const std::int32_t tail = head_ + wide_ * kWide + thread;
    if (thread < kWide && tail < entries_) largest = max(largest, static_cast<unsigned>(pages_[tail]));
    return largest >= num_pages_;
  }

 private:
  static constexpr std::int32_t kWide = 4;
  static constexpr int kAtOnce = 6;

  __device__ void load(std::int32_t base) {
    const auto* const wide = reinterpret_cast<const uint4*>(pages_ + head_);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::int32_t at = base + static_cast<std::int32_t>(threadIdx.x) + i * kThreads;
      ahead_[i] = at < wide_ ? wide[at] : uint4{0, 0, 0, 0};
    }
  }

  const std::int32_t* pages_;
  std::int64_t num_pages_;
  std::int32_t entries_;
  std::int32_t head_;  ///< entries before the first aligned sixteen bytes
  std::int32_t wide_;
  uint4 ahead_[kAtOnce];
};

__device__ std::int32_t whole_chunk_tokens(std::int32_t pages, std::int32_t page_size) {
  const std::int64_t tokens = std::int64_t{pages} * page_size;
  return static_cast<std::int32_t>(tokens < INT32_MAX ? tokens : INT32_MAX);
}

/// The request that owns item base + lane, by a whole warp; `base` is an item, one request's behind another's.
__device__ std::int32_t owner_of_lane(const std::int32_t* first_chunk, std::int32_t batch, std::int32_t tiles,
                                      std::int32_t base) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const auto starts_at = [&](std::int32_t r) { return first_chunk[min(r, batch)] * tiles; };
  // First item's owner: the last request that starts at or before it, found in two steps.
  std::int32_t low = 0;
#pragma unroll
  for (int step = kWarp; step > 0; step /= kWarp) {
    const std::int32_t r = low + lane * step;
    low += (__popc(__ballot_sync(kAllLanes, r < batch && starts_at(r) <= base)) - 1) * step;
  }
  const std::int32_t next = starts_at(low + 1 + lane) - base;
  const unsigned starts = __reduce_or_sync(kAllLanes, next < kWarp ? 1U << next : 0U);
  return low + __popc(starts & (kAllLanes >> (kWarp - 1 - lane)));
}

/// The schedule of these chunks; by the whole block.
__device__ void write_schedule(const Schedule& schedule, const DevicePlan& plan, std::int32_t batch,
                               const std::int32_t* first_chunk, std::int32_t chunk_pages) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t items = first_chunk[batch] * plan.tiles;
  // Each array begins with other warps, so that they are written side by side.
#pragma unroll 1
  for (std::int32_t base = thread - thread % kWarp; base < schedule.padded_items; base += kThreads) {
    const std::int32_t i = base + thread % kWarp;
    std::int32_t request = 0;
    std::int32_t tile = 0;
    std::int32_t part = 0;
    if (base < items) request = owner_of_lane(first_chunk, batch, plan.tiles, base);
    if (i < items) {
      part = i - first_chunk[request] * plan.tiles;
      if (plan.tiles > 1) {
        const std::int32_t chunks = first_chunk[request + 1] - first_chunk[request];
        tile = plan.tiles - 1 - part / chunks;  // the last tile of a causal request sees most: longest work first
        part %= chunks;
      }
    } else {
      request = 0;
    }
    if (i < schedule.padded_items) {
      schedule.request_indices[i] = request;
      schedule.qo_tile_indices[i] = tile;
      schedule.kv_tile_indices[i] = part;
      schedule.block_valid[i] = i < items ? 1 : 0;
    }
  }
#pragma unroll 1
  for (std::int32_t r = (thread + kThreads / 2) % kThreads; r <= batch; r += kThreads) {
    schedule.o_indptr[r] = (plan.split_kv ? first_chunk[r] : r) * plan.qo_len;
  }
  if (schedule.merge_indptr != nullptr) {
#pragma unroll 1
    for (std::int32_t row = (thread + kThreads / 4) % kThreads; row <= batch * plan.qo_len; row += kThreads) {
      const std::int32_t r = plan.qo_len == 1 ? row : row / plan.qo_len;
      const std::int32_t chunks = r < batch ? first_chunk[r + 1] - first_chunk[r] : 0;
      schedule.merge_indptr[row] = first_chunk[r] * plan.qo_len + (row - r * plan.qo_len) * chunks;
    }
  }
#pragma unroll 1
  for (std::int32_t i = (thread + kThreads / 8) % kThreads; i < schedule.counted; i += kThreads) {
    schedule.arrivals[i] = 0;
  }
  if (thread == 0) {
    *schedule.kv_chunk_size = whole_chunk_tokens(chunk_pages, plan.page_size);
    *schedule.total_num_rows = batch * plan.qo_len;
  }
}

/// Leaves nothing to do, not even to merge; by the whole block.
__device__ void write_no_work(const Schedule& schedule, std::int32_t rows) {
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < schedule.padded_items; i += kThreads) {
    schedule.block_valid[i] = 0;
  }
  if (schedule.merge_indptr == nullptr) return;
#pragma unroll 1
  for (auto row = static_cast<std::int32_t>(threadIdx.x); row <= rows; row += kThreads) schedule.merge_indptr[row] = 0;
}

__device__ void raise(GraphAlarm* alarm, const LiveFault& fault) {
  alarm->reason = static_cast<std::int32_t>(fault.reason);
  alarm->request = fault.request;
  alarm->found = fault.found;
  alarm->expected = fault.expected;
  __threadfence_system();
  // Replays follow one another, so nobody else counts; over PCIe there are no atomics.
  auto* const trips = static_cast<volatile std::uint32_t*>(&alarm->trips);
  *trips = *trips + 1;
}

/// A request as the table has it, and the pages that were planned for.
struct Extent {
  std::int32_t begin;
  std::int32_t end;
  std::int32_t last;
  std::int32_t planned;

  __device__ Extent(const Args& args, std::int32_t r)
      : begin(args.table.indptr[r]), end(args.table.indptr[r + 1]), last(args.table.last_page_len[r]) {
    planned = args.prepared != nullptr ? args.prepared_indptr[r + 1] - args.prepared_indptr[r] : end - begin;
  }

  __device__ std::int32_t pages() const { return end - begin; }
  __device__ LiveFault fault(const LiveTable& table, std::int32_t r) const {
    const LiveFault fault = check_extent(table, r, begin, end, last);
    if (fault.reason != Reason::kNone || pages() == planned) return fault;
    return {Reason::kStaleTable, r, pages(), planned};
  }
};

/// Leaves the part without work and tells of the first request at fault; by the whole block. `in_pages`: all extents
/// hold, and some entry of the first `entries` is no page.
__device__ __noinline__ void fail_closed(const Args& args, bool in_pages, std::int32_t entries) {
  __shared__ std::int32_t first_bad;  // entry or request
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const LiveTable& table = args.table;
  const Part& part = args.parts[blockIdx.x];
  const std::int32_t last = (in_pages ? entries : args.batch) - 1;
  if (thread == 0) first_bad = last;
  __syncthreads();
#pragma unroll 1
  for (std::int32_t i = thread; i < last; i += kThreads) {
    const LiveFault fault = in_pages ? check_page(table, 0, i) : Extent(args, i).fault(table, i);
    if (fault.reason == Reason::kNone) continue;
    atomicMin(&first_bad, i);
    break;
  }
  write_no_work(part.schedule, args.batch * part.plan.qo_len);
  if (args.prepared != nullptr && thread == 0) args.prepared[1 + args.num_parts + blockIdx.x] = 0;
  __syncthreads();
  if (blockIdx.x > 0) return;
#pragma unroll 1
  for (std::int32_t r = thread; r < args.batch; r += kThreads) args.kv_lens[r] = 0;
  if (thread > 0) return;
  if (args.prepared != nullptr && args.prepared[0] != args.batch) {
    raise(args.alarm, {Reason::kBatch, 0, args.batch, args.prepared[0]});
  } else if (in_pages) {
    std::int32_t r = 0;
    while (r + 1 < args.batch && table.indptr[r + 1] <= first_bad) ++r;
    raise(args.alarm, check_page(table, r, first_bad));
  } else {
    raise(args.alarm, Extent(args, first_bad).fault(table, first_bad));
  }
}

__global__ void __launch_bounds__(kThreads) replan_kernel(const __grid_constant__ Args args) {
  __shared__ alignas(sizeof(int4)) std::int32_t rest[kMostRequests];  // pages beyond one that requests walk
  __shared__ std::int32_t first_chunk[kMostRequests + 1];
  __shared__ unsigned counts[ChunkSearch::kCounts];
  __shared__ std::int32_t warp_sums[kWarps];
  __shared__ Totals sums[kWarps];
  const LiveTable& table = args.table;
  const Schedule& schedule = args.parts[blockIdx.x].schedule;
  const DevicePlan& plan = args.parts[blockIdx.x].plan;
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto lane = thread % kWarp;
  const bool stale_check = args.prepared != nullptr;
  await_previous_kernel();

  // All that is read first is asked for first.
  const std::int32_t entries = min(max(table.indptr[args.batch], 0), table.max_pages);
  Extent extent(args, min(thread, args.batch - 1));
  const std::int32_t planned_batch = stale_check ? args.prepared[0] : args.batch;
  const std::int32_t planned_chunk = stale_check ? args.prepared[1 + blockIdx.x] : 0;
  std::int32_t* const stands = stale_check ? &args.prepared[1 + args.num_parts + blockIdx.x] : nullptr;
  const bool write = !stale_check || *stands == 0;
  PageScan scan(table, entries);

  for (std::int32_t i = thread; i < ChunkSearch::kCounts; i += kThreads) counts[i] = 0;
  bool bad = planned_batch != args.batch;
  Totals mine{0, 0, 1};
#pragma unroll 1
  for (std::int32_t r = thread; r < (args.batch + 3) / 4 * 4; r += kThreads) {
    if (r >= kThreads) extent = Extent(args, min(r, args.batch - 1));
    std::int32_t walks = 1;
    if (r < args.batch) {
      bad = bad || extent.fault(table, r).reason != Reason::kNone;
      walks = min(max(extent.pages(), 1), plan.reach);
      mine.pages += static_cast<unsigned>(walks);
      mine.spared += static_cast<unsigned>(min(walks, plan.spared_span));
      mine.longest = max(mine.longest, walks);
      if (blockIdx.x == 0) {
        args.kv_lens[r] = static_cast<std::int32_t>(count_tokens(extent.pages(), table.page_size, extent.last));
      }
    }
    rest[r] = walks - 1;
  }
  if (write) {
    const Totals sum = warp_totals(mine);
    if (lane == 0) sums[thread / kWarp] = sum;
  }
  if (__syncthreads_or(bad ? 1 : 0) != 0) return fail_closed(args, false, entries);
  if (write) {
    const Totals totals = warp_totals(lane < kWarps ? sums[lane] : Totals{0, 0, 1});
    std::int32_t chunk_pages = totals.longest;
    if (stale_check) {
      chunk_pages = (planned_chunk - 1) / plan.page_size + 1;
    } else if (plan.fixed_chunk_pages > 0) {
      chunk_pages = plan.fixed_chunk_pages;
    } else if (plan.split_kv) {
      chunk_pages = ChunkSearch(plan, rest, args.batch, totals.longest, counts).choose(totals);
    }
    sum_chunks(rest, args.batch, chunk_pages, warp_sums, first_chunk);
    // Written before all know whether the pages are good: where they are not, it is taken back.
    write_schedule(schedule, plan, args.batch, first_chunk, chunk_pages);
  }
  if (__syncthreads_or(scan.any_bad() ? 1 : 0) != 0) return fail_closed(args, true, entries);
  if (stale_check && write && thread == 0) *stands = 1;
}

}  // namespace

cudaError_t replan(const ReplanLaunch& launch, cudaStream_t stream) {
  Args args{.table = {.indptr = launch.table.indptr,
                      .indices = launch.table.indices,
                      .last_page_len = launch.table.last_page_len,
                      .page_size = launch.page_size,
                      .max_pages = launch.max_pages,
                      .num_pages = launch.num_pages},
            .kv_lens = launch.kv_lens,
            .prepared = launch.prepared,
            .prepared_indptr = launch.prepared_indptr,
            .alarm = launch.alarm,
            .batch = launch.batch,
            .num_parts = static_cast<std::int32_t>(launch.parts.size())};
  for (std::size_t i = 0; i < launch.parts.size(); ++i) {
    const ReplanLaunch::Part& part = launch.parts[i];
    const ScheduleShape& shape = *part.shape;
    const auto ints = [&](std::size_t offset) { return reinterpret_cast<std::int32_t*>(part.schedule + offset); };
    args.parts[i].schedule = {
        .request_indices = ints(shape.request_indices),
        .qo_tile_indices = ints(shape.qo_tile_indices),
        .kv_tile_indices = ints(shape.kv_tile_indices),
        .o_indptr = ints(shape.o_indptr),
        .merge_indptr = shape.split_kv ? ints(shape.merge_indptr) : nullptr,
        .kv_chunk_size = ints(shape.kv_chunk_size),
        .total_num_rows = ints(shape.total_num_rows),
        .arrivals = ints(shape.arrivals),
        .block_valid = reinterpret_cast<std::uint8_t*>(part.schedule + shape.block_valid_mask),
        .padded_items = shape.padded_items,
        .counted = static_cast<std::int32_t>((shape.block_valid_mask - shape.arrivals) / sizeof(std::int32_t))};
    args.parts[i].plan = part.plan;
  }
  cudaFuncAttributes attributes;
  if (const cudaError_t status = cudaFuncGetAttributes(&attributes, &replan_kernel); status != cudaSuccess) {
    return status;
  }
  return launch_ahead(&replan_kernel, static_cast<unsigned>(launch.parts.size()), kThreads, 0, stream,
                      attributes.ptxVersion >= 90, args);
}

}  // namespace fiw::cuda
