// Split-KV schedules: sizes first, then the arrays that the kernels read.
#include <algorithm>
#include <array>
#include <limits>

#include "core/fail.h"
#include "plan/chunk.h"
#include "plan/device_plan.h"
#include "plan/planner.h"
#include "plan/tiling.h"

namespace fiw {
namespace {

constexpr std::size_t kAlignment = 16;
constexpr std::int64_t kInt32Max = std::numeric_limits<std::int32_t>::max();

constexpr std::size_t align_up(std::size_t bytes) noexcept {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

std::int32_t checked_int32(std::int64_t value, const char* what) {
  if (value > kInt32Max) fail(Reason::kSizeOverflow, "{} is {}, which does not fit 32 bits", what, value);
  return static_cast<std::int32_t>(value);
}

// The last page of a chunk may reach past what 32 bits count, where no token lies.
std::int32_t chunk_tokens(std::int32_t pages, std::int32_t page_size) {
  const std::int64_t tokens = std::int64_t{pages} * page_size;
  if (tokens - page_size < kInt32Max) return static_cast<std::int32_t>(std::min(tokens, kInt32Max));
  return checked_int32(tokens, "the KV chunk in tokens");
}

// FlashInfer's tile kernel tells the chunks of a row from the causal limit, so under a window it merges wrongly when
// there is no such limit.
bool splittable(KernelFamily family, const WorkLoad& work, const SplitPolicy& policy) noexcept {
  const bool mismatched = family == KernelFamily::kTensorTile && work.window_left >= 0 && !work.causal;
  return policy.allow_split && !mismatched;
}

std::int32_t fixed_chunk_pages(const WorkLoad& work, const SplitPolicy& policy) noexcept {
  return ceil_div(policy.fixed_chunk_tokens, work.page_size);
}

// Most tiles that `batch` requests with `rows` query tokens in all can have. A uniform batch always has as many.
std::int64_t most_tiles(const Tiling& tiling, const WorkLoad& work, std::int32_t tile_rows, std::int64_t batch,
                        std::int64_t rows) noexcept {
  if (tiling.uniform()) return batch * tiling.tiles_of(work.uniform_qo_len);
  return tile_rows == 0 ? batch : (rows * work.group_size() + batch * (tile_rows - 1)) / tile_rows;
}

// Most partial rows that `items` items can write. A tile of packed rows holds fewer query tokens by the group size.
std::int64_t rows_of_items(std::int64_t items, std::int32_t qo_len, std::int32_t tiles, std::int32_t tile_rows,
                           std::int32_t group) noexcept {
  if (qo_len > 0) return tiles == 0 ? 0 : items / tiles * qo_len;  // uniform: a chunk has all tiles of its request
  return items * tile_rows / group;
}

bool is_cuda(KernelFamily family) noexcept {
  return family == KernelFamily::kCudaCore || family == KernelFamily::kTensorTile;
}

// Two CUDA kernels address partial outputs with 32-bit element offsets.
void check_partial_elements(const ScheduleShape& shape, const WorkLoad& work) {
  const std::int64_t row_elements = std::int64_t{work.num_qo_heads} * work.head_dim_vo;
  if (is_cuda(shape.family) && row_elements > 0 &&
      shape.partial_rows > std::numeric_limits<std::uint32_t>::max() / row_elements) {
    fail(Reason::kSizeOverflow, "partial outputs are {} rows of {} elements, which 32-bit offsets do not reach",
         shape.partial_rows, row_elements);
  }
}

void check_family(KernelFamily family, std::int32_t max_qo_len) {
  if (is_hopper(family)) throw Error(Status::kInternal, Reason::kBug, "Hopper schedules are shape_hopper's");
  const std::int32_t most = family == KernelFamily::kCudaCore     ? 1
                            : family == KernelFamily::kCpuStream  ? kCpuStreamMaxQoLen
                            : family == KernelFamily::kCudaStream ? kCudaStreamRows
                                                                  : std::numeric_limits<std::int32_t>::max();
  if (max_qo_len > most) {
    throw Error(Status::kInternal, Reason::kBug,
                fmt::format("a request has {} query tokens, this kernel family takes {}", max_qo_len, most));
  }
}

// Offsets in writing order; every array starts aligned and owns the gap behind it.
void lay_out(ScheduleShape& shape, std::int32_t num_kv_heads) noexcept {
  const auto place = [&](std::size_t elements, std::size_t element_bytes) {
    const std::size_t offset = shape.bytes;
    shape.bytes += align_up(elements * element_bytes);
    return offset;
  };
  const auto items = static_cast<std::size_t>(shape.padded_items);
  shape.request_indices = place(items, sizeof(std::int32_t));
  shape.qo_tile_indices = place(items, sizeof(std::int32_t));
  shape.kv_tile_indices = place(items, sizeof(std::int32_t));
  shape.o_indptr = place(static_cast<std::size_t>(shape.padded_batch) + 1, sizeof(std::int32_t));
  shape.merge_indptr =
      place(shape.split_kv ? static_cast<std::size_t>(shape.padded_rows) + 1 : 0, sizeof(std::int32_t));
  shape.kv_chunk_size = place(1, sizeof(std::int32_t));
  shape.total_num_rows = place(1, sizeof(std::int32_t));
  const bool counts = shape.split_kv && shape.family == KernelFamily::kCudaStream;
  shape.arrivals =
      place(counts ? static_cast<std::size_t>(shape.padded_batch) * static_cast<std::size_t>(num_kv_heads) : 0,
            sizeof(std::uint32_t));
  shape.block_valid_mask = place(shape.graph ? items : 0, sizeof(std::uint8_t));
}

// Partial rows of the batch at hand.
std::int64_t count_partial_rows(const Tiling& tiling, std::int32_t chunk_pages) noexcept {
  const FastDiv chunk(static_cast<std::uint32_t>(chunk_pages));
  std::int64_t rows = 0;
  for (std::int32_t r = 0; r < tiling.batch(); ++r) {
    rows += std::int64_t{tiling.qo_len(r)} * chunk.ceil(static_cast<std::uint32_t>(tiling.pages(r)));
  }
  return rows;
}

// Items that splitting may add to a graph's grid. A fixed split's chunks but the first of a request are full.
std::int64_t spare_items(const Tiling& tiling, const Grid& grid, const SplitPolicy& policy, const WorkLoad& work) {
  if (policy.fixed_chunk_tokens == 0 || policy.max_pages == 0) return grid.spare_items();
  return std::int64_t{tiling.tiles_of(work.uniform_qo_len)} * (policy.max_pages / fixed_chunk_pages(work, policy));
}

// Fixes the grid of a captured graph: what the largest batch can need under any table.
void pad_for_graph(ScheduleShape& shape, const Tiling& tiling, const WorkLoad& work, const SplitPolicy& policy,
                   std::int64_t spare_items) {
  if (!tiling.uniform() && shape.tile_rows == 0) {
    fail(Reason::kOptions, "a graph of this kernel family needs the same number of query tokens in every request");
  }
  shape.padded_batch = policy.max_batch > 0 ? policy.max_batch : shape.batch;
  if (shape.batch > shape.padded_batch) {
    fail(Reason::kBatch, "the batch has {} requests, the graph was sized for {}", shape.batch, shape.padded_batch);
  }
  shape.padded_rows = shape.total_rows;
  if (tiling.uniform()) {
    shape.padded_rows =
        checked_int32(std::int64_t{work.uniform_qo_len} * shape.padded_batch, "the number of query rows");
  }
  shape.padded_items =
      checked_int32(most_tiles(tiling, work, shape.tile_rows, shape.padded_batch, shape.padded_rows) + spare_items,
                    "the number of work items");
  if (shape.items > shape.padded_items) {
    fail(Reason::kOptions, "splitting every {} tokens makes {} work items, the graph's grid holds {}",
         shape.kv_chunk_tokens, shape.items, shape.padded_items);
  }
}

std::span<std::int32_t> ints(std::span<std::byte> out, std::size_t begin, std::size_t end) noexcept {
  return {reinterpret_cast<std::int32_t*>(out.data() + begin), (end - begin) / sizeof(std::int32_t)};
}

}  // namespace

ScheduleShape shape_schedule(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                             const SplitPolicy& policy) {
  ScheduleShape shape;
  shape.family = family;
  shape.batch = work.batch();
  shape.total_rows = checked_int32(work.total_rows(), "the number of query rows");
  shape.tile_rows = choose_tile_rows(family, device, work, policy);
  shape.graph = policy.graph;

  const Tiling tiling(family, work, shape.tile_rows);
  const Tiling::Totals totals = tiling.totals();
  check_family(family, totals.max_qo_len);
  shape.max_qo_len = totals.max_qo_len;
  const Grid grid(family, device, work);
  const bool may_split = splittable(family, work, policy);
  std::int32_t chunk_pages = totals.longest;
  if (may_split) {
    chunk_pages = policy.fixed_chunk_tokens > 0 ? fixed_chunk_pages(work, policy) : choose_chunk(tiling, totals, grid);
  }
  const std::int64_t items = tiling.items(chunk_pages);
  // A graph's kernels read the chunk at replay, when a later table may need it. A fixed split merges even a single
  // chunk: a request's arithmetic must not tell whether another one was cut.
  const bool always = policy.graph || (policy.fixed_chunk_tokens > 0 && items > 0);
  shape.split_kv = may_split && (always || items > totals.uncut_items);
  if (!shape.split_kv) chunk_pages = totals.longest;
  shape.items = checked_int32(items, "the number of work items");
  shape.max_chunks = ceil_div(totals.longest, chunk_pages);
  shape.kv_chunk_tokens = chunk_tokens(chunk_pages, work.page_size);
  shape.padded_items = shape.items;
  shape.padded_batch = shape.batch;
  shape.padded_rows = shape.total_rows;
  if (policy.graph) pad_for_graph(shape, tiling, work, policy, may_split ? spare_items(tiling, grid, policy, work) : 0);
  if (shape.split_kv) {
    const std::int32_t uniform = tiling.uniform() ? work.uniform_qo_len : 0;
    shape.partial_rows = policy.graph ? rows_of_items(shape.padded_items, uniform, tiling.tiles_of(uniform),
                                                      shape.tile_rows, work.group_size())
                                      : count_partial_rows(tiling, chunk_pages);
    checked_int32(shape.partial_rows, "the number of partial rows");
    check_partial_elements(shape, work);
  }
  lay_out(shape, work.num_kv_heads);
  return shape;
}

DevicePlan device_plan(const ScheduleShape& shape, const DeviceProps& device, const WorkLoad& work,
                       const SplitPolicy& policy) {
  const Tiling tiling(shape.family, work, shape.tile_rows);
  const bool fixed = shape.split_kv && policy.fixed_chunk_tokens > 0;
  const std::int32_t tiles = tiling.tiles_of(work.uniform_qo_len);
  const Grid grid(shape.family, device, work);
  const std::int64_t uncut = std::int64_t{tiles} * work.batch();
  DevicePlan plan{.qo_len = work.uniform_qo_len,
                  .tiles = tiles,
                  .reach = tiling.reach_of(work.uniform_qo_len),
                  .spared_span = tiling.spared_span(work.uniform_qo_len),
                  .fixed_chunk_pages = fixed ? fixed_chunk_pages(work, policy) : 0,
                  .page_size = work.page_size,
                  .split_kv = shape.split_kv,
                  .rule = ChunkRule(uncut, grid)};
  const ChunkLimits limits = chunk_limits(uncut, grid);
  for (std::size_t i = 0; i < limits.size() && tiles > 0; ++i) {
    plan.most_chunks[i] = static_cast<std::uint32_t>(
        std::min<std::int64_t>(limits[i] / tiles, std::numeric_limits<std::uint32_t>::max()));
  }
  return plan;
}

void write_schedule(const ScheduleShape& shape, const WorkLoad& work, std::span<std::byte> out) {
  const auto bug = [](const char* what) { throw Error(Status::kInternal, Reason::kBug, what); };
  if (out.size() < shape.bytes) bug("the memory for a schedule is smaller than its shape");
  if (work.batch() != shape.batch || work.total_rows() != shape.total_rows) bug("a schedule is written for other work");

  const auto requests = ints(out, shape.request_indices, shape.qo_tile_indices);
  const auto qo_tiles = ints(out, shape.qo_tile_indices, shape.kv_tile_indices);
  const auto kv_tiles = ints(out, shape.kv_tile_indices, shape.o_indptr);
  const auto o_indptr = ints(out, shape.o_indptr, shape.merge_indptr);
  const auto merge_indptr = ints(out, shape.merge_indptr, shape.kv_chunk_size);

  const Tiling tiling(shape.family, work, shape.tile_rows);
  const FastDiv chunk(static_cast<std::uint32_t>(ceil_div(shape.kv_chunk_tokens, work.page_size)));
  std::size_t item = 0;
  std::size_t row = 0;
  std::int32_t partial = 0;
  for (std::int32_t r = 0; r < shape.batch; ++r) {
    const auto chunks = static_cast<std::int32_t>(chunk.ceil(static_cast<std::uint32_t>(tiling.pages(r))));
    const std::int32_t tiles = tiling.tiles(r);
    if (static_cast<std::int64_t>(item) + std::int64_t{tiles} * chunks > shape.items) {
      bug("a schedule is written for other work");
    }
    // The last tile of a causal request sees most: longest work first.
    for (std::int32_t tile = tiles - 1; tile >= 0; --tile) {
      for (std::int32_t t = 0; t < chunks; ++t, ++item) {
        requests[item] = r;
        qo_tiles[item] = tile;
        kv_tiles[item] = t;
      }
    }
    o_indptr[static_cast<std::size_t>(r)] = partial;
    const std::int32_t qo_len = tiling.qo_len(r);
    if (shape.split_kv) {
      for (std::int32_t p = 0; p < qo_len; ++p, partial += chunks) merge_indptr[row++] = partial;
    } else {
      partial += qo_len;
    }
  }
  if (item != static_cast<std::size_t>(shape.items)) bug("a schedule is written for other work");

  // Padding reads as item 0 (kernels look before they ask the mask) and as rows without partials.
  for (const auto array : {requests, qo_tiles, kv_tiles}) std::fill(array.begin() + item, array.end(), 0);
  std::fill(o_indptr.begin() + shape.batch, o_indptr.end(), partial);
  std::fill(merge_indptr.begin() + row, merge_indptr.end(), partial);
  const auto put = [&](std::size_t begin, std::size_t end, std::int32_t value) {
    const auto array = ints(out, begin, end);
    std::fill(array.begin(), array.end(), 0);
    array[0] = value;
  };
  put(shape.kv_chunk_size, shape.total_num_rows, shape.kv_chunk_tokens);
  put(shape.total_num_rows, shape.arrivals, shape.total_rows);
  std::ranges::fill(ints(out, shape.arrivals, shape.block_valid_mask), 0);
  const auto mask = out.subspan(shape.block_valid_mask, shape.bytes - shape.block_valid_mask);
  const std::size_t valid = shape.graph ? item : 0;
  std::fill(mask.begin(), mask.begin() + valid, std::byte{1});
  std::fill(mask.begin() + valid, mask.end(), std::byte{0});
}

std::size_t partial_bytes(const ScheduleShape& shape, std::int32_t num_qo_heads, std::int32_t head_dim_vo) {
  if (!shape.split_kv) return 0;
  const auto row_bytes = static_cast<std::int64_t>(sizeof(float)) * num_qo_heads * (std::int64_t{head_dim_vo} + 1);
  std::int64_t bytes = 0;  // of both arrays, each with room for its alignment
  if (__builtin_mul_overflow(shape.partial_rows, row_bytes, &bytes) ||
      __builtin_add_overflow(bytes, std::int64_t{2 * kAlignment}, &bytes)) {
    fail(Reason::kSizeOverflow, "partial outputs are {} rows of {} heads of {} elements, more bytes than int64 holds",
         shape.partial_rows, num_qo_heads, head_dim_vo);
  }
  const std::size_t states = static_cast<std::size_t>(shape.partial_rows) * num_qo_heads;
  return align_up(states * head_dim_vo * sizeof(float)) + align_up(states * sizeof(float));
}

ScheduleShape worst_shape(KernelFamily family, const DeviceProps& device, const WorkLoad& widest,
                          std::int32_t max_batch, std::int32_t max_kv_pages, std::int64_t max_total_rows,
                          const SplitPolicy& policy) {
  ScheduleShape shape;
  shape.family = family;
  shape.graph = policy.graph;
  shape.batch = shape.padded_batch = max_batch;
  const bool uniform = widest.uniform_qo_len > 0;
  const std::int64_t rows = uniform ? std::int64_t{widest.uniform_qo_len} * max_batch : max_total_rows;
  shape.total_rows = shape.padded_rows = checked_int32(rows, "the number of query rows");
  const std::int32_t group = widest.group_size();
  if (max_batch == 0 || rows == 0) return shape;

  // Tiles never shrink as requests grow, and larger tiles write more partial rows: one request with all rows is worst.
  shape.max_qo_len = uniform ? widest.uniform_qo_len : shape.total_rows;
  if (family == KernelFamily::kCpuStream) shape.max_qo_len = std::min(shape.max_qo_len, kCpuStreamMaxQoLen);
  if (family == KernelFamily::kCudaStream) shape.max_qo_len = std::min(shape.max_qo_len, kCudaStreamRows);
  const bool any_length = !uniform && policy.fixed_chunk_tokens > 0;
  shape.tile_rows =
      choose_tile_rows(family, device, widest,
                       any_length ? std::numeric_limits<std::int64_t>::max() : std::int64_t{shape.max_qo_len} * group);
  const std::array<std::int32_t, 2> one_request = {0, shape.max_qo_len};
  WorkLoad longest = widest;
  longest.kv_pages = {&max_kv_pages, 1};
  longest.qo_indptr = {};
  if (!uniform) longest.qo_indptr = one_request;
  const Tiling tiling(family, longest, shape.tile_rows);
  const Grid grid(family, device, widest);
  if (!splittable(family, widest, policy)) return shape;

  // A split adds at most spare_items() items, each of them one more partial for every row of its tile.
  const auto rows_of = [&](std::int64_t items) {
    if (!uniform && shape.tile_rows == 0) return items * shape.max_qo_len;
    return rows_of_items(items, uniform ? widest.uniform_qo_len : 0, tiling.tiles(0), shape.tile_rows, group);
  };
  if (policy.graph) {
    shape.split_kv = true;
    shape.partial_rows = rows_of(most_tiles(tiling, longest, shape.tile_rows, max_batch, rows) + grid.spare_items());
    return shape;
  }
  const std::int32_t least_chunk =
      policy.fixed_chunk_tokens > 0 ? fixed_chunk_pages(widest, policy) : grid.min_chunk_pages;
  const std::int64_t chunks = ceil_div(tiling.pages(0), least_chunk);
  shape.split_kv = chunks > 1 || policy.fixed_chunk_tokens > 0;
  if (shape.split_kv) {
    shape.partial_rows = rows * chunks;
    if (policy.fixed_chunk_tokens == 0) {
      shape.partial_rows = std::min(shape.partial_rows, rows + rows_of(grid.spare_items()));
    }
  }
  return shape;
}

}  // namespace fiw
