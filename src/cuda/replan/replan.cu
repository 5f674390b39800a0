// One block a kind of layer. All threads look at the table, then all seek the chunk, then all write. What takes time
// here is waiting, not work: loads are under way before they are needed, nothing is divided by a number but by its
// reciprocal, and the chunk is sought among many candidates at once instead of by halves. Most of all it waits for its
// own instructions, each of which runs but a few times: so loops are not unrolled. The result is that of the planners
// on the host, entry for entry.
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
constexpr std::int32_t kNone = INT32_MAX;

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

struct Args {
  Schedule schedules[kMostParts];
  DevicePlan plans[kMostParts];
  LiveTable table;
  std::int32_t* kv_lens;
  std::int32_t* prepared;
  const std::int32_t* prepared_indptr;
  std::int32_t batch;
  GraphAlarm* alarm;
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
  /// For n >= 1.
  __device__ std::int32_t ceil(std::int32_t n) const { return floor(n - 1) + 1; }

 private:
  unsigned divisor_;
  unsigned reciprocal_;
};

/// What the batch walks; in shared memory.
struct Totals {
  unsigned pages;
  unsigned spared;
  std::int32_t longest;
};

/// The search for a chunk, by a whole block, of which the first kWarps warps count: ten candidates for each limit of
/// the rule, a round.
class ChunkSearch {
 public:
  static constexpr int kWarps = 8;
  static constexpr int kRounds = 3;

  /// `counts` [kRounds * kWarp] are zeros in shared memory.
  __device__ ChunkSearch(const DevicePlan& plan, const std::int32_t* walked, std::int32_t batch, std::int32_t longest,
                         unsigned* counts)
      : plan_(plan),
        walked_(walked),
        batch_(batch),
        least_(plan.rule.least_chunk(longest)),
        longest_(longest),
        counts_(counts) {}

  __device__ std::int32_t choose(const Totals& totals) {
#pragma unroll 1
    for (int stride = kSteps * kSteps; stride > 0; stride /= kSteps) {
      narrow(stride);
      counts_ += kWarp;
    }
    const double tiles = plan_.tiles;
    return choose_chunk([this](int i) { return chunk_at(last_of(i)); },
                        {.visible_pages = tiles * (totals.pages - 0.5 * totals.spared), .longest = longest_},
                        plan_.rule);
  }

 private:
  static constexpr int kSteps = 10;
  static constexpr int kLastIndex = kSteps * kSteps * kSteps - 1;
  static_assert(kSteps * ChunkRule::kLimits <= kWarp && kRounds == 3);

  /// Makes the first good one of the kSteps candidates up to last_[i], `stride` apart, the new last_[i].
  __device__ void narrow(int stride) {
    const auto warp = static_cast<int>(threadIdx.x) / kWarp;
    const auto lane = static_cast<int>(threadIdx.x) % kWarp;
    // A lane has one candidate, a warp some of the requests.
    const int limit = min(lane / kSteps, ChunkRule::kLimits - 1);
    const int step = min(lane - limit * kSteps, kSteps - 1);
    if (warp < kWarps) {
      const Divisor by(chunk_at(last_of(limit) - (kSteps - 1 - step) * stride));
      unsigned count = 0;
#pragma unroll 4
      for (std::int32_t r = warp; r < batch_; r += kWarps) count += static_cast<unsigned>(by.ceil(walked_[r]));
      atomicAdd(&counts_[lane], count);
    }
    __syncthreads();
    const unsigned most = limit == 0 ? plan_.most_chunks[0] : limit == 1 ? plan_.most_chunks[1] : plan_.most_chunks[2];
    const unsigned good = __ballot_sync(kAllLanes, counts_[lane] <= most);
#pragma unroll
    for (int i = 0; i < ChunkRule::kLimits; ++i) {
      const int first = __ffs(static_cast<int>(good >> (i * kSteps))) - 1;
      last_[i] -= (kSteps - 1 - first) * stride;  // the last one is always good
    }
  }

  __device__ std::int32_t chunk_at(int index) const { return nth_chunk(index, least_, longest_); }
  /// Without an index at run time, which would put the array into memory.
  __device__ int last_of(int i) const { return i == 0 ? last_[0] : i == 1 ? last_[1] : last_[2]; }

  const DevicePlan& plan_;
  const std::int32_t* walked_;
  std::int32_t batch_;
  std::int32_t least_;
  std::int32_t longest_;
  unsigned* counts_;                                                     ///< of the round
  int last_[ChunkRule::kLimits] = {kLastIndex, kLastIndex, kLastIndex};  ///< the first index known to be good
};

/// Writes the chunks before each request, and their total behind them; by the whole block, each thread two requests.
__device__ void sum_chunks(const std::int32_t* walked, std::int32_t batch, std::int32_t chunk_pages,
                           std::int32_t* warp_sums, std::int32_t* first_chunk) {
  static_assert(kMostRequests <= 2 * kThreads && kWarps <= kWarp);
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarp;
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarp;
  const std::int32_t r = 2 * static_cast<std::int32_t>(threadIdx.x);
  const bool busy = 2 * kWarp * warp < batch;
  std::int32_t two = 0;
  std::int32_t sum = 0;
  if (busy) {
    const Divisor by(chunk_pages);
    two = r + 1 < batch ? by.ceil(walked[r + 1]) : 0;
    sum = two + (r < batch ? by.ceil(walked[r]) : 0);
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::int32_t before = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += before;
    }
    if (lane == kWarp - 1) warp_sums[warp] = sum;
  }
  __syncthreads();
  if (busy) {
    const std::int32_t before = __reduce_add_sync(kAllLanes, lane < warp ? warp_sums[lane] : 0);
    if (r < batch) first_chunk[r + 1] = before + sum - two;
    if (r + 1 < batch) first_chunk[r + 2] = before + sum;
  }
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

/// The last request whose first chunk, or page, is at or before `index`.
__device__ std::int32_t owner(const std::int32_t* first, std::int32_t batch, std::int32_t index) {
  std::int32_t low = 0;
#pragma unroll 1
  for (std::int32_t high = batch; high - low > 1;) {
    const std::int32_t middle = low + (high - low) / 2;
    (first[middle] <= index ? low : high) = middle;
  }
  return low;
}

__device__ std::int32_t whole_chunk_tokens(std::int32_t pages, std::int32_t page_size) {
  const std::int64_t tokens = std::int64_t{pages} * page_size;
  return static_cast<std::int32_t>(tokens < INT32_MAX ? tokens : INT32_MAX);
}

/// The schedule of these chunks; by the whole block.
__device__ void write_schedule(const Schedule& schedule, const DevicePlan& plan, std::int32_t batch,
                               const std::int32_t* first_chunk, std::int32_t chunk_pages) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t items = first_chunk[batch] * plan.tiles;
  // Each array begins with other warps, so that they are written side by side.
#pragma unroll 1
  for (std::int32_t i = thread; i < schedule.padded_items; i += kThreads) {
    std::int32_t request = 0;
    std::int32_t tile = 0;
    std::int32_t part = 0;
    if (i < items) {
      request = owner(first_chunk, batch, plan.tiles == 1 ? i : i / plan.tiles);
      part = i - first_chunk[request] * plan.tiles;
      if (plan.tiles > 1) {
        const std::int32_t chunks = first_chunk[request + 1] - first_chunk[request];
        tile = plan.tiles - 1 - part / chunks;  // the last tile of a causal request sees most: longest work first
        part %= chunks;
      }
    }
    schedule.request_indices[i] = request;
    schedule.qo_tile_indices[i] = tile;
    schedule.kv_tile_indices[i] = part;
    schedule.block_valid[i] = i < items ? 1 : 0;
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
};

__global__ void __launch_bounds__(kThreads) replan_kernel(const __grid_constant__ Args args) {
  __shared__ std::int32_t walked[kMostRequests];
  __shared__ std::int32_t first_chunk[kMostRequests + 1];
  __shared__ unsigned counts[ChunkSearch::kRounds * kWarp];
  __shared__ std::int32_t warp_sums[kWarps];
  __shared__ Totals totals;
  __shared__ std::int32_t at_fault;
  __shared__ LiveFault fault;
  __shared__ std::int32_t told;
  const LiveTable& table = args.table;
  const Schedule& schedule = args.schedules[blockIdx.x];
  const DevicePlan& plan = args.plans[blockIdx.x];
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const bool stale_check = args.prepared != nullptr;

  // All that is read first is asked for first.
  const std::int32_t entries = min(max(table.indptr[args.batch], 0), table.max_pages);
  const std::int32_t planned_batch = stale_check ? args.prepared[0] : args.batch;
  const std::int32_t planned_chunk = stale_check ? args.prepared[1 + blockIdx.x] : 0;
  std::int32_t* const stands = stale_check ? &args.prepared[1 + gridDim.x + blockIdx.x] : nullptr;
  const bool write = !stale_check || *stands == 0;
  Extent extent(args, min(thread, args.batch - 1));
  PageScan scan(table, entries);

  if (thread == 0) {
    at_fault = kNone;
    told = 0;
    totals = {0, 0, 1};
  }
  if (thread < ChunkSearch::kRounds * kWarp) counts[thread] = 0;
  __syncthreads();
  // The first request at fault is told of: threads agree on it, then the one that found it says what is wrong.
  LiveFault mine;
  const auto found = [&](const LiveFault& f) {
    if (mine.reason == Reason::kNone) mine = f;
    atomicMin(&at_fault, f.request);
  };
  if (thread == 0 && planned_batch != args.batch) found({Reason::kBatch, 0, args.batch, planned_batch});
#pragma unroll 1
  for (std::int32_t first = thread - thread % kWarp; first < args.batch; first += kThreads) {
    const std::int32_t r = first + thread % kWarp;
    if (first >= kThreads) extent = Extent(args, min(r, args.batch - 1));
    std::int32_t walks = 0;
    if (r < args.batch) {
      const LiveFault f = check_extent(table, r, extent.begin, extent.end, extent.last);
      const std::int32_t count = extent.end - extent.begin;
      if (f.reason != Reason::kNone) {
        found(f);
      } else {
        if (count != extent.planned) found({Reason::kStaleTable, r, count, extent.planned});
        walks = walked[r] = min(max(count, 1), plan.reach);
        if (blockIdx.x == 0) {
          args.kv_lens[r] = static_cast<std::int32_t>(count_tokens(count, table.page_size, extent.last));
        }
      }
    }
    if (!write) continue;
    const unsigned sum = __reduce_add_sync(kAllLanes, static_cast<unsigned>(walks));
    const unsigned spared = __reduce_add_sync(kAllLanes, static_cast<unsigned>(min(walks, plan.spared_span)));
    const std::int32_t longest = __reduce_max_sync(kAllLanes, walks);
    if (thread % kWarp == 0) {
      atomicAdd(&totals.pages, sum);
      atomicAdd(&totals.spared, spared);
      atomicMax(&totals.longest, longest);
    }
  }
  __syncthreads();
  const bool extents_hold = at_fault == kNone;
  if (extents_hold) {
    const bool bad_page = scan.any_bad();
    if (write) {
      std::int32_t chunk_pages = totals.longest;
      if (stale_check) {
        chunk_pages = (planned_chunk - 1) / plan.page_size + 1;
      } else if (plan.fixed_chunk_pages > 0) {
        chunk_pages = plan.fixed_chunk_pages;
      } else if (plan.split_kv) {
        chunk_pages = ChunkSearch(plan, walked, args.batch, totals.longest, counts).choose(totals);
      }
      sum_chunks(walked, args.batch, chunk_pages, warp_sums, first_chunk);
      // Written before all know whether the pages are good: where they are not, it is taken back below.
      write_schedule(schedule, plan, args.batch, first_chunk, chunk_pages);
    }
    if (__syncthreads_or(bad_page ? 1 : 0) == 0) {
      if (stale_check && write && thread == 0) *stands = 1;
      return;
    }
#pragma unroll 1
    for (std::int32_t entry = thread; entry < entries; entry += kThreads) {
      if (table.indices[entry] >= 0 && table.indices[entry] < table.num_pages) continue;
      found(check_page(table, owner(table.indptr, args.batch, entry), entry));
      break;
    }
    __syncthreads();
  }
  if (mine.reason != Reason::kNone && mine.request == at_fault && atomicExch(&told, 1) == 0) fault = mine;
  __syncthreads();
  write_no_work(schedule, args.batch * plan.qo_len);
  if (stale_check && thread == 0) *stands = 0;
  if (blockIdx.x > 0) return;
#pragma unroll 1
  for (std::int32_t r = thread; r < args.batch; r += kThreads) args.kv_lens[r] = 0;
  if (thread == 0) raise(args.alarm, fault);
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
            .batch = launch.batch,
            .alarm = launch.alarm};
  for (std::size_t i = 0; i < launch.parts.size(); ++i) {
    const ReplanLaunch::Part& part = launch.parts[i];
    const ScheduleShape& shape = *part.shape;
    const auto ints = [&](std::size_t offset) { return reinterpret_cast<std::int32_t*>(part.schedule + offset); };
    args.schedules[i] = {
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
    args.plans[i] = part.plan;
  }
  return launch_kernel(&replan_kernel, static_cast<unsigned>(launch.parts.size()), kThreads, stream, args);
}

}  // namespace fiw::cuda
