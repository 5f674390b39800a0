// See workspace_state.h.
#include "core/workspace_state.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

#include "core/allocate.h"
#include "core/exclusive.h"
#include "core/fail.h"
#include "core/hash.h"
#include "core/support.h"
#include "core/work.h"
#include "plan/planner.h"

namespace fiw::detail {
namespace {

constexpr std::size_t kDefaultScratch = std::size_t{16} << 20;
constexpr std::size_t kNoLimit = std::numeric_limits<std::size_t>::max();

/// Adds the time of a scope to a counter, unless an exception leaves it.
class Timer {
 public:
  explicit Timer(std::uint64_t& nanoseconds) : nanoseconds_(nanoseconds), start_(std::chrono::steady_clock::now()) {}
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  ~Timer() {
    if (std::uncaught_exceptions() > exceptions_) return;
    nanoseconds_ += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start_).count());
  }

 private:
  std::uint64_t& nanoseconds_;
  std::chrono::steady_clock::time_point start_;
  int exceptions_ = std::uncaught_exceptions();
};

bool verify_graph_from_environment() {
  const char* value = std::getenv("SMILE_VERIFY_CUDA_GRAPH");
  return value != nullptr && std::string_view(value) == "1";
}

std::int32_t max_qo_len(std::span<const std::int32_t> qo_indptr, std::int32_t uniform_qo_len) {
  if (qo_indptr.empty()) return uniform_qo_len;
  std::int32_t longest = 0;
  for (std::size_t r = 0; r + 1 < qo_indptr.size(); ++r) longest = std::max(longest, qo_indptr[r + 1] - qo_indptr[r]);
  return longest;
}

// Tokens of K and V that a prefill call reads; 0 for the kinds whose keys hold no lengths.
std::int64_t total_kv(const WorkspaceState::Request& request) {
  if (request.kind == PlanKind::kPrefill) return request.table->total_kv();
  return std::accumulate(request.kv_lens.begin(), request.kv_lens.end(), std::int64_t{0});
}

std::int64_t decode_pages(const WorkspaceState::Request& request, const PlanOptions& options) {
  if (request.kind != PlanKind::kDecode || options.batch_invariant) return 0;
  return static_cast<std::int64_t>(request.table->indices().size());
}

std::int32_t batch_of(const WorkspaceState::Request& request) {
  return request.table != nullptr ? request.table->batch() : static_cast<std::int32_t>(request.kv_lens.size());
}

/// The query rows of a request whose window or indptr is legal.
std::int64_t checked_rows(const WorkspaceState::Request& request) {
  const std::int32_t batch = batch_of(request);
  if (request.kind == PlanKind::kPrefill || request.kind == PlanKind::kRagged) {
    return support::check_indptr("qo_indptr", request.qo_indptr, batch);
  }
  if (request.kind == PlanKind::kVerify &&
      (request.uniform_qo_len < 1 || request.uniform_qo_len > support::kMaxVerifyWindow)) {
    fail(Reason::kQoIndptr, "window is {}, expected 1..{} tokens a request", request.uniform_qo_len,
         support::kMaxVerifyWindow);
  }
  return std::int64_t{request.uniform_qo_len} * batch;
}

bool has_surplus_queries(const WorkspaceState::Request& request) {
  const std::span<const std::int32_t> kv_lens = request.table != nullptr ? request.table->kv_lens() : request.kv_lens;
  for (std::size_t r = 0; r + 1 < request.qo_indptr.size(); ++r) {
    if (request.qo_indptr[r + 1] - request.qo_indptr[r] > kv_lens[r]) return true;
  }
  return false;
}

// A Hopper schedule over K and V that lie request after request, in pages, or in pages of which `gathered_kv` tokens
// are copied together first.
ScheduleShape hopper_schedule(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                              const SplitPolicy& policy, std::int64_t gathered_kv) {
  const std::int32_t tile_rows = hopper_tile_rows(family, device, work, policy);
  const HopperShape hopper = shape_hopper(family, tile_rows, device, work, policy);
  return {.family = family,
          .batch = work.batch(),
          .total_rows = static_cast<std::int32_t>(work.total_rows()),
          .max_qo_len = max_qo_len(work.qo_indptr, work.uniform_qo_len),
          .items = hopper.works,
          .padded_items = hopper.padded_works,
          .padded_batch = work.batch(),
          .padded_rows = static_cast<std::int32_t>(work.total_rows()),
          .tile_rows = tile_rows,
          .bytes = hopper.bytes,
          .hopper = hopper,
          .gathered_kv = gathered_kv};
}

void write_hopper_schedule(const ScheduleShape& shape, const DeviceProps& device, const WorkLoad& work,
                           std::span<const std::int32_t> kv_lens, HopperScratch& scratch, std::span<std::byte> out) {
  scratch.kv_indptr.assign(kv_lens.size() + 1, 0);
  std::partial_sum(kv_lens.begin(), kv_lens.end(), scratch.kv_indptr.begin() + 1);
  write_hopper(shape.family, shape.tile_rows, shape.hopper, device, work, scratch.kv_indptr, kv_lens, scratch.bytes,
               out);
}

/// Of two tensors of one shape.
bool same_elements(const ConstTensor& a, const ConstTensor& b) {
  return a.data == b.data && (a.rows <= 1 || a.row_stride == b.row_stride) &&
         (a.heads <= 1 || a.head_stride == b.head_stride);
}

std::uint64_t hash_key(const PlanKeyView& key, std::uint64_t counts_hash) {
  const AttentionParams& params = key.traits.spec.params;
  std::uint64_t h = combine(counts_hash, static_cast<std::uint64_t>(key.traits.kind));
  h = combine(h,
              static_cast<std::uint64_t>(params.num_qo_heads) << 32 | static_cast<std::uint32_t>(params.window_left));
  return key.qo_indptr.empty() ? h : hash_ints(key.qo_indptr, h);
}

}  // namespace

WorkspaceState::WorkspaceState(int device_index, std::unique_ptr<Backend> backend, const WorkspaceOptions& options)
    : device_index_(device_index),
      options_(options),
      verify_cuda_graph_(options.verify_cuda_graph.value_or(verify_graph_from_environment())),
      backend_(std::move(backend)),
      props_(backend_->props()),
      arena_(std::make_shared<Arena>(backend_)),
      decode_cache_(options.cache_entries),
      prefill_cache_(options.cache_entries),
      verify_cache_(options.cache_entries),
      device_tables_(options.cache_entries) {
  std::size_t bytes = options.workspace_bytes;
  if (bytes == 0) {
    bytes = options.limits ? FlashInferWorkspace::required_workspace(props_, *options.limits, options.plan)
                           : kDefaultScratch;
  }
  if (bytes == 0) return;
  scratch_ = {allocate_or_throw(*backend_, bytes, "float scratch", nullptr), bytes};
}

WorkspaceState::~WorkspaceState() { close(); }

void WorkspaceState::close() noexcept {
  const Turn turn(busy_);
  if (closed_.exchange(true, std::memory_order_acq_rel)) return;
  decode_cache_.clear();
  prefill_cache_.clear();
  verify_cache_.clear();
  device_tables_.clear();
  if (!scratch_.empty()) backend_->release(scratch_.data(), scratch_.size(), nullptr);
  scratch_ = {};
  // Slices that steps still hold keep the arena, and the arena the backend, until those steps go.
  arena_.reset();
  backend_.reset();
}

void WorkspaceState::check_open() const {
  if (closed()) throw Error(Status::kClosed, Reason::kClosedWorkspace, "the workspace is closed");
}

void WorkspaceState::check_ready() const {
  check_open();
  if (busy_.load(std::memory_order_acquire)) throw_busy();
}

void WorkspaceState::invalidate(Scope scope) {
  if (closed()) return;
  const Exclusive exclusive(busy_);
  switch (scope) {
    case Scope::kRuntime:
      ++runtime_epoch_;
      decode_cache_.invalidate();
      prefill_cache_.invalidate();
      device_tables_.clear();
      break;
    case Scope::kPrefill:
      prefill_cache_.invalidate();
      break;
    case Scope::kVerify:
      ++verify_epoch_;
      verify_cache_.invalidate();
      break;
  }
}

PageTable WorkspaceState::read_table(const DevicePageTable& table, Stream stream) {
  const Exclusive exclusive(busy_);
  check_open();
  return device_tables_.read(*backend_, table, stream);
}

PlanCache& WorkspaceState::cache_of(PlanKind kind) noexcept {
  switch (kind) {
    case PlanKind::kDecode:
      return decode_cache_;
    case PlanKind::kVerify:
      return verify_cache_;
    case PlanKind::kPrefill:
    case PlanKind::kRagged:
      break;
  }
  return prefill_cache_;
}

WorkspaceState::Found WorkspaceState::plan(const Request& request, const StepSpec& spec) {
  const Exclusive exclusive(busy_);
  check_open();
  const StepSpec resolved = support::resolve(spec);
  return find_or_make(request, resolved, checked_rows(request), nullptr);
}

WorkspaceState::Found WorkspaceState::find_or_make(const Request& request, const StepSpec& spec,
                                                   std::int64_t total_rows, Stream stream) {
  const bool paged = request.table != nullptr;
  const Timer timer(plan_nanoseconds_);
  PlanKeyView key;
  key.traits = {.kind = request.kind,
                .family = KernelFamily::kCpuStream,
                .spec = spec,
                .options = options_.plan,
                .page_size = paged ? request.table->page_size() : 1,
                .uniform_qo_len = request.qo_indptr.empty() ? request.uniform_qo_len : 0,
                .graph = props_.kind == DeviceKind::kCuda && request.kind == PlanKind::kVerify && verify_cuda_graph_};
  key.traits.family = backend_->route({.spec = spec,
                                       .page_size = key.traits.page_size,
                                       .max_qo_len = max_qo_len(request.qo_indptr, request.uniform_qo_len),
                                       .total_rows = total_rows,
                                       .total_kv = total_kv(request),
                                       .decode_pages = decode_pages(request, options_.plan),
                                       .batch = batch_of(request),
                                       .paged = paged,
                                       .graph = key.traits.graph,
                                       .scratch_limit = options_.fixed_size ? scratch_.size() : kNoLimit,
                                       .surplus_queries = has_surplus_queries(request),
                                       .any_qo_len = options_.plan.batch_invariant && !request.qo_indptr.empty()});
  key.kv_counts = paged ? request.table->page_counts() : request.kv_lens;
  key.qo_indptr = request.qo_indptr;
  if (request.kind == PlanKind::kPrefill) key.table = request.table;
  key.hash = hash_key(key, paged ? request.table->page_counts_hash() : hash_ints(request.kv_lens));

  PlanCache& cache = cache_of(request.kind);
  if (std::shared_ptr<Plan> plan = cache.find(key)) {
    reserve_scratch(plan->scratch_bytes, stream);
    return {.plan = std::move(plan), .hit = true};
  }
  std::shared_ptr<Plan> plan = make(key, request, stream);
  cache.insert(plan);
  return {.plan = std::move(plan), .hit = false};
}

std::shared_ptr<Plan> WorkspaceState::make(const PlanKeyView& key, const Request& request, Stream stream) {
  // Everything that can fail comes before the cache is touched, so a failure leaves the last good plans in force.
  const WorkLoad work = work_load(key.traits, key.kv_counts, key.qo_indptr);
  SplitPolicy policy = split_policy(key.traits.options, key.traits.graph);
  const KernelFamily family = key.traits.family;
  const bool hopper = is_hopper(family);
  const bool in_place = family == KernelFamily::kHopperPaged ||
                        (family == KernelFamily::kPrefill && key.traits.page_size % kPrefillPageSlots == 0 &&
                         key.traits.spec.kv_dtype == key.traits.spec.q_dtype);
  const bool gathers = hopper && !in_place && key.table != nullptr;
  const std::int64_t gathered = gathers ? total_kv(request) : 0;
  if (hopper && options_.fixed_size) {
    policy.partial_limit = scratch_.size() - std::min(scratch_.size(), gather_bytes(key.traits.spec, gathered));
  }
  const ScheduleShape shape =
      hopper ? hopper_schedule(family, props_, work, policy, gathered) : shape_schedule(family, props_, work, policy);
  // Without rows nothing is launched.
  const std::size_t scratch = shape.total_rows == 0 ? 0 : backend_->scratch_bytes(shape, key.traits.spec);
  reserve_scratch(scratch, stream);

  std::shared_ptr<Plan> plan = cache_of(request.kind).blank();
  plan->slice = arena_->take(shape.bytes, stream);
  plan->set_key(key);
  plan->shape = shape;
  plan->scratch_bytes = scratch;
  const std::span<std::byte> staged = backend_->stage(plan->slice.data(), shape.bytes);
  if (hopper) {
    write_hopper_schedule(shape, props_, work, request.table != nullptr ? request.table->kv_lens() : request.kv_lens,
                          hopper_scratch_, staged);
  } else {
    write_schedule(shape, work, staged);
  }
  backend_->upload(plan->slice.data(), staged, stream);
  return plan;
}

void WorkspaceState::reserve_scratch(std::size_t bytes, Stream stream) {
  scratch_peak_ = std::max(scratch_peak_, bytes);
  if (bytes <= scratch_.size()) return;
  if (options_.fixed_size) {
    throw Error(
        Status::kWorkspaceTooSmall, Reason::kScratchTooSmall,
        fmt::format("the workspace holds {} bytes of float scratch, this call needs {}", scratch_.size(), bytes))
        .needs(bytes);
  }
  std::byte* const memory = allocate_or_throw(*backend_, bytes, "float scratch", stream);
  if (!scratch_.empty()) backend_->release(scratch_.data(), scratch_.size(), stream);
  scratch_ = {memory, bytes};
}

void WorkspaceState::check_operands(const StepSpec& spec, const Extent& extent, const Operands& operands) const {
  const AttentionParams& params = spec.params;
  Regions read;
  Regions written;
  support::check_tensor("q", operands.q, extent.total_rows, params.num_qo_heads, params.head_dim_qk, spec.q_dtype,
                        device_index_, read);
  support::check_tensor("out", operands.out, extent.total_rows, params.num_qo_heads, params.head_dim_vo, spec.q_dtype,
                        device_index_, written);
  if (operands.lse != nullptr && !spec.lse) {
    fail(Reason::kStepMismatch, "lse is given, the step was planned without it");
  }
  support::check_array("lse", operands.lse, extent.total_rows * params.num_qo_heads, written);
  support::check_distinct(written);
  if (extent.table != nullptr) {
    support::check_kv_cache(*operands.kv, *extent.table, device_index_, read, read);
    support::check_kv_matches(*operands.kv, spec);
  } else {
    support::check_ragged(*operands.ragged, spec, device_index_, read);
  }
  support::check_extras(operands.extras, spec, extent.qo_indptr, extent.uniform_qo_len, extent.kv_lens,
                        device_index_ == kCpuDevice && !extent.captured, read);
  support::check_apart(written, read);
}

void WorkspaceState::attend(const Plan& plan, const PageTable* table, const Operands& operands) {
  const ScheduleShape& shape = plan.shape;
  if (shape.total_rows == 0) return;

  const Timer timer(run_nanoseconds_);
  reserve_scratch(plan.scratch_bytes, operands.stream);
  backend_->attend({.shape = &shape,
                    .schedule = plan.slice.data(),
                    .params = &plan.traits.spec.params,
                    .q = operands.q,
                    .qo_indptr = plan.qo_indptr,
                    .uniform_qo_len = plan.traits.uniform_qo_len,
                    .kv = table != nullptr ? operands.kv : nullptr,
                    .table = table,
                    .ragged = operands.ragged,
                    .out = operands.out,
                    .lse = operands.lse,
                    .extras = operands.extras,
                    .scratch = scratch_.first(plan.scratch_bytes),
                    .stream = operands.stream});
}

std::span<const std::int32_t> WorkspaceState::ragged_lens(std::span<const std::int32_t> qo_indptr,
                                                          std::span<const std::int32_t> kv_indptr) {
  if (qo_indptr.empty()) fail(Reason::kQoIndptr, "qo_indptr is empty, expected batch + 1 entries");
  support::check_indptr("kv_indptr", kv_indptr, static_cast<std::int32_t>(qo_indptr.size() - 1));
  ragged_lens_.resize(qo_indptr.size() - 1);
  for (std::size_t r = 0; r < ragged_lens_.size(); ++r) ragged_lens_[r] = kv_indptr[r + 1] - kv_indptr[r];
  return ragged_lens_;
}

void WorkspaceState::call(Request request, const Operands& operands, const AttentionParams& params) {
  const Exclusive exclusive(busy_);
  check_open();
  const bool paged = request.table != nullptr;
  const StepSpec spec =
      support::resolve({.params = params,
                        .q_dtype = operands.q.dtype,
                        .kv_dtype = paged ? operands.kv->dtype : operands.ragged->k.dtype,
                        .lse = operands.lse != nullptr,
                        .sinks = operands.extras.sinks != nullptr,
                        .alibi = operands.extras.alibi_slopes != nullptr,
                        .custom_mask = operands.extras.mask != nullptr || operands.extras.mask_indptr != nullptr});
  if (!paged) request.kv_lens = ragged_lens(request.qo_indptr, operands.ragged->indptr);
  const std::int64_t total_rows = checked_rows(request);
  check_operands(spec,
                 {.total_rows = total_rows,
                  .qo_indptr = request.qo_indptr,
                  .uniform_qo_len = request.uniform_qo_len,
                  .kv_lens = paged ? request.table->kv_lens() : request.kv_lens,
                  .table = request.table},
                 operands);
  const Found found = find_or_make(request, spec, total_rows, operands.stream);
  attend(*found.plan, request.table, operands);
}

void WorkspaceState::run(const AttentionStep& step, const Operands& operands) {
  const Exclusive exclusive(busy_);
  check_open();
  const Plan& plan = *step.plan_;
  check_operands(plan.traits.spec,
                 {.total_rows = plan.shape.total_rows,
                  .qo_indptr = plan.qo_indptr,
                  .uniform_qo_len = plan.traits.uniform_qo_len,
                  .kv_lens = step.table_.kv_lens(),
                  .table = &step.table_},
                 operands);
  attend(plan, &step.table_, operands);
}

void WorkspaceState::check_append(const AppendLaunch& launch) const {
  const PageTable& table = *launch.table;
  const std::int32_t rows = support::check_indptr("append_indptr", launch.append_indptr, table.batch());
  Regions written;
  Regions read;
  support::check_kv_cache(*launch.kv, table, device_index_, written, read);
  support::check_append_dtype(launch.k.dtype);
  support::check_tensor("k", launch.k, rows, launch.kv->num_kv_heads, launch.kv->head_dim_qk, launch.k.dtype,
                        device_index_, read);
  support::check_tensor("v", launch.v, rows, launch.kv->num_kv_heads, launch.kv->head_dim_vo, launch.k.dtype,
                        device_index_, read);
  support::check_array("append_indptr", launch.append_indptr.data(), std::ssize(launch.append_indptr), read);
  support::check_distinct(written);
  support::check_apart(written, read);
}

void WorkspaceState::append(const AppendLaunch& launch) {
  const Exclusive exclusive(busy_);
  check_open();
  check_append(launch);
  const std::span<const std::int32_t> kv_lens = launch.table->kv_lens();
  for (std::size_t r = 0; r < kv_lens.size(); ++r) {
    const std::int32_t tokens = launch.append_indptr[r + 1] - launch.append_indptr[r];
    if (tokens > kv_lens[r]) {
      fail_at(r, Reason::kBatch, "request {} appends {} tokens, its page table entry counts {} in all", r, tokens,
              kv_lens[r]);
    }
  }
  if (launch.append_indptr.empty() || launch.append_indptr.back() == 0) return;
  backend_->append(launch);
}

void WorkspaceState::merge(const MergeLaunch& launch) {
  const Exclusive exclusive(busy_);
  check_open();
  const Tensor& out = launch.out;
  if (launch.parts.empty()) fail(Reason::kPartialStates, "parts is empty, expected at least 1 state");
  support::check_merge_shape(out);
  Regions outs;
  Regions lses;
  support::check_tensor("out", out, out.rows, out.heads, out.dim, out.dtype, device_index_, outs);
  support::check_distinct(outs);
  const std::int64_t states = out.rows * out.heads;  // fits, as out does
  support::check_array("lse", launch.lse, states, lses);
  support::check_apart(lses, outs);
  for (const PartialState& part : launch.parts) {
    Regions part_outs;
    Regions part_lses;
    support::check_tensor("a part's out", part.out, out.rows, out.heads, out.dim, out.dtype, device_index_, part_outs);
    if (out.rows > 0 && part.lse == nullptr) fail(Reason::kTensorNull, "a part's lse is null");
    support::check_array("a part's lse", part.lse, states, part_lses);
    // A part may be replaced by the result: each element is read before it is written.
    if (!same_elements(part.out, out)) support::check_apart(outs, part_outs);
    if (part.lse != launch.lse) support::check_apart(lses, part_lses);
    support::check_apart(outs, part_lses);
    support::check_apart(lses, part_outs);
  }
  if (out.rows == 0) return;
  backend_->merge(launch);
}

WorkspaceStats WorkspaceState::stats() const {
  if (closed()) return {};
  const Exclusive exclusive(busy_);
  if (closed()) return {};
  return {.decode = decode_cache_.stats(),
          .prefill = prefill_cache_.stats(),
          .verify = verify_cache_.stats(),
          .float_scratch_bytes = scratch_.size(),
          .float_scratch_peak = scratch_peak_,
          .int_scratch_bytes = arena_->capacity(),
          .plan_nanoseconds = plan_nanoseconds_,
          .run_nanoseconds = run_nanoseconds_,
          .tables_known = device_tables_.known(),
          .tables_copied = device_tables_.copied()};
}

}  // namespace fiw::detail
