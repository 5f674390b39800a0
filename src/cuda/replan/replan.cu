// One block a kind of layer. The first warp looks for the chunk while the others look over the pages; then all write.
// The arithmetic is that of the planners on the host, whose schedules these equal entry for entry.
#include "cuda/replan/replan.h"
#include "plan/chunk_search.h"
#include "plan/live_table.h"

namespace fiw::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarp = 32;
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
  std::uint8_t* block_valid;
  std::int32_t padded_items;
};

struct Args {
  Schedule schedules[kMostParts];
  DevicePlan plans[kMostParts];
  LiveTable table;
  std::int32_t* kv_lens;
  const std::int32_t* prepared;
  const std::int32_t* prepared_indptr;
  std::int32_t batch;
  GraphAlarm* alarm;
};

/// Items of a chunk, counted by one warp.
struct WarpItems {
  const std::int32_t* walked;
  std::int32_t batch;
  std::int32_t tiles;

  __device__ std::int64_t operator()(std::int32_t chunk_pages) const {
    unsigned chunks = 0;
    // Rounded up: halfway between two integers, a quotient of 32-bit numbers is never rounded across one.
    const double inverse = 1.0 / chunk_pages;
    for (std::int32_t r = threadIdx.x % kWarp; r < batch; r += kWarp) {
      chunks += static_cast<unsigned>((walked[r] + (chunk_pages - 0.5)) * inverse);
    }
    return std::int64_t{tiles} * __reduce_add_sync(kAllLanes, chunks);
  }
};

/// The chunk that the host would choose; all lanes of a warp take part, and get it.
__device__ std::int32_t find_chunk(const DevicePlan& plan, const std::int32_t* walked, std::int32_t batch) {
  unsigned pages = 0;
  unsigned spared = 0;
  unsigned longest = 1;
  for (std::int32_t r = threadIdx.x % kWarp; r < batch; r += kWarp) {
    pages += static_cast<unsigned>(walked[r]);
    spared += static_cast<unsigned>(min(walked[r], plan.spared_span));
    longest = max(longest, static_cast<unsigned>(walked[r]));
  }
  pages = __reduce_add_sync(kAllLanes, pages);
  spared = __reduce_add_sync(kAllLanes, spared);
  longest = __reduce_max_sync(kAllLanes, longest);
  if (plan.fixed_chunk_pages > 0) return plan.fixed_chunk_pages;
  if (!plan.split_kv) return static_cast<std::int32_t>(longest);
  const double tiles = plan.tiles;
  return choose_chunk(WarpItems{walked, batch, plan.tiles},
                      {.uncut_items = std::int64_t{plan.tiles} * batch,
                       .walked_pages = tiles * pages,
                       .visible_pages = tiles * (pages - 0.5 * spared),
                       .longest = static_cast<std::int32_t>(longest)},
                      plan.grid);
}

/// Writes the chunks before each request, and their total behind them; by one warp.
__device__ void count_chunks(const std::int32_t* walked, std::int32_t batch, std::int32_t chunk_pages,
                             std::int32_t* first_chunk) {
  const std::int32_t lane = threadIdx.x % kWarp;
  std::int32_t total = 0;
  for (std::int32_t base = 0; base < batch; base += kWarp) {
    const std::int32_t r = base + lane;
    const std::int32_t chunks = r < batch ? (walked[r] - 1) / chunk_pages + 1 : 0;
    std::int32_t sum = chunks;
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::int32_t before = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += before;
    }
    if (r < batch) first_chunk[r] = total + sum - chunks;
    total += __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  if (lane == 0) first_chunk[batch] = total;
}

/// The last request whose first item, or page, is at or before `index`.
__device__ std::int32_t owner(const std::int32_t* first, std::int32_t batch, std::int32_t index) {
  std::int32_t low = 0;
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

__device__ void write_valid(const Schedule& schedule, std::int32_t items) {
  for (std::int32_t i = threadIdx.x; i < schedule.padded_items; i += kThreads) {
    schedule.block_valid[i] = i < items ? 1 : 0;
  }
}

__global__ void __launch_bounds__(kThreads) replan_kernel(const __grid_constant__ Args args) {
  __shared__ std::int32_t walked[kMostRequests];
  __shared__ std::int32_t first_chunk[kMostRequests + 1];
  __shared__ std::int32_t at_fault;
  __shared__ LiveFault fault;
  __shared__ std::int32_t told;
  __shared__ std::int32_t chunk_pages;
  const LiveTable& table = args.table;
  const Schedule& schedule = args.schedules[blockIdx.x];
  const DevicePlan& plan = args.plans[blockIdx.x];
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const bool stale_check = args.prepared != nullptr;

  // The first request at fault is told of: threads agree on it, then the one that found it says what is wrong.
  if (thread == 0) {
    at_fault = kNone;
    told = 0;
  }
  __syncthreads();
  LiveFault mine;
  const auto found = [&](const LiveFault& f) {
    if (mine.reason == Reason::kNone) mine = f;
    atomicMin(&at_fault, f.request);
  };
  if (stale_check && thread == 0 && *args.prepared != args.batch) {
    found({Reason::kBatch, 0, args.batch, *args.prepared});
  }
  for (std::int32_t r = thread; r < args.batch; r += kThreads) {
    const LiveFault f = check_extent(table, r);
    if (f.reason != Reason::kNone) {
      found(f);
      continue;
    }
    const std::int32_t pages = table.indptr[r + 1] - table.indptr[r];
    walked[r] = min(max(pages, 1), plan.reach);
    if (blockIdx.x == 0) args.kv_lens[r] = live_kv_len(table, r);
    if (stale_check) {
      const std::int32_t planned = args.prepared_indptr[r + 1] - args.prepared_indptr[r];
      if (pages != planned) found({Reason::kStaleTable, r, pages, planned});
    }
  }
  __syncthreads();
  const bool extents_hold = at_fault == kNone;
  __syncthreads();  // all have read it before the pages' faults are written to it
  if (extents_hold) {
    if (thread < kWarp) {
      const std::int32_t chunk =
          stale_check ? (args.prepared[1 + blockIdx.x] - 1) / plan.page_size + 1 : find_chunk(plan, walked, args.batch);
      count_chunks(walked, args.batch, chunk, first_chunk);
      if (thread == 0) chunk_pages = chunk;
    } else {
      // Several at a time: the loads are what takes time.
      constexpr int kAtOnce = 8;
      constexpr std::int32_t kStride = kThreads - kWarp;
      const std::int32_t entries = table.indptr[args.batch];
      for (std::int32_t first = thread - kWarp; first < entries; first += kStride * kAtOnce) {
        std::int32_t pages[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const std::int32_t entry = first + i * kStride;
          pages[i] = entry < entries ? table.indices[entry] : 0;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (pages[i] >= 0 && pages[i] < table.num_pages) continue;
          const std::int32_t entry = first + i * kStride;
          found(check_page(table, owner(table.indptr, args.batch, entry), entry));
        }
      }
    }
  }
  __syncthreads();
  if (at_fault != kNone) {
    if (mine.reason != Reason::kNone && mine.request == at_fault && atomicExch(&told, 1) == 0) fault = mine;
    __syncthreads();
    write_valid(schedule, 0);
    if (schedule.merge_indptr != nullptr) {
      for (std::int32_t row = thread; row <= args.batch * plan.qo_len; row += kThreads) schedule.merge_indptr[row] = 0;
    }
    for (std::int32_t r = thread; blockIdx.x == 0 && r < args.batch; r += kThreads) args.kv_lens[r] = 0;
    if (thread == 0 && blockIdx.x == 0) {
      args.alarm->reason = static_cast<std::int32_t>(fault.reason);
      args.alarm->request = fault.request;
      args.alarm->found = fault.found;
      args.alarm->expected = fault.expected;
      __threadfence_system();
      // Replays follow one another, so nobody else counts; over PCIe there are no atomics.
      *static_cast<volatile std::uint32_t*>(&args.alarm->trips) += 1;
    }
    return;
  }

  // A prepared plan is written again, too: a trip, or a step of another bucket, may have been where it was.
  const std::int32_t items = first_chunk[args.batch] * plan.tiles;
  write_valid(schedule, items);
  for (std::int32_t i = thread; i < schedule.padded_items; i += kThreads) {
    std::int32_t request = 0;
    std::int32_t tile = 0;
    std::int32_t part = 0;
    if (i < items) {
      request = owner(first_chunk, args.batch, i / plan.tiles);
      const std::int32_t chunks = first_chunk[request + 1] - first_chunk[request];
      const std::int32_t place = i - first_chunk[request] * plan.tiles;
      tile = plan.tiles - 1 - place / chunks;  // the last tile of a causal request sees most: longest work first
      part = place % chunks;
    }
    schedule.request_indices[i] = request;
    schedule.qo_tile_indices[i] = tile;
    schedule.kv_tile_indices[i] = part;
  }
  for (std::int32_t r = thread; r <= args.batch; r += kThreads) {
    schedule.o_indptr[r] = (plan.split_kv ? first_chunk[r] : r) * plan.qo_len;
  }
  if (schedule.merge_indptr != nullptr) {
    for (std::int32_t row = thread; row <= args.batch * plan.qo_len; row += kThreads) {
      const std::int32_t r = row / plan.qo_len;
      const std::int32_t chunks = r < args.batch ? first_chunk[r + 1] - first_chunk[r] : 0;
      schedule.merge_indptr[row] = first_chunk[r] * plan.qo_len + row % plan.qo_len * chunks;
    }
  }
  if (thread == 0) {
    *schedule.kv_chunk_size = whole_chunk_tokens(chunk_pages, plan.page_size);
    *schedule.total_num_rows = args.batch * plan.qo_len;
  }
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
    args.schedules[i] = {.request_indices = ints(shape.request_indices),
                         .qo_tile_indices = ints(shape.qo_tile_indices),
                         .kv_tile_indices = ints(shape.kv_tile_indices),
                         .o_indptr = ints(shape.o_indptr),
                         .merge_indptr = shape.split_kv ? ints(shape.merge_indptr) : nullptr,
                         .kv_chunk_size = ints(shape.kv_chunk_size),
                         .total_num_rows = ints(shape.total_num_rows),
                         .block_valid = reinterpret_cast<std::uint8_t*>(part.schedule + shape.block_valid_mask),
                         .padded_items = shape.padded_items};
    args.plans[i] = part.plan;
  }
  replan_kernel<<<static_cast<unsigned>(launch.parts.size()), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace fiw::cuda
