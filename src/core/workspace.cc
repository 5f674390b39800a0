// The public workspace: each call names its arguments and hands them to the state.
#include "fiw/workspace.h"

#include "core/backend.h"
#include "core/fail.h"
#include "core/support.h"
#include "core/workspace_state.h"

namespace fiw {

using detail::WorkspaceState;

namespace {

std::unique_ptr<Backend> make_backend([[maybe_unused]] int device_index, const WorkspaceOptions& options) {
#ifdef FIW_HAS_CUDA
  if (device_index != kCpuDevice) return make_cuda_backend(device_index, options.allocator, options.cuda_route);
#endif
  return make_cpu_backend(options.num_threads, options.allocator);
}

}  // namespace

std::unique_ptr<FlashInferWorkspace> FlashInferWorkspace::create(int device_index, std::size_t workspace_bytes) {
  return create(device_index, WorkspaceOptions{.workspace_bytes = workspace_bytes});
}

std::unique_ptr<FlashInferWorkspace> FlashInferWorkspace::create(int device_index, const WorkspaceOptions& options) {
  if (device_index < kCpuDevice) {
    throw Error(Status::kNoDevice, Reason::kDeviceMissing,
                fmt::format("device_index is {}, expected -1 (the CPU) or a CUDA device's ordinal", device_index));
  }
  if (device_index != kCpuDevice && !compiled_with(DeviceKind::kCuda)) return nullptr;
  support::check_options(options);
  return std::unique_ptr<FlashInferWorkspace>(new FlashInferWorkspace(
      std::make_shared<WorkspaceState>(device_index, make_backend(device_index, options), options)));
}

FlashInferWorkspace::FlashInferWorkspace(std::shared_ptr<WorkspaceState> state) noexcept : state_(std::move(state)) {}

FlashInferWorkspace::~FlashInferWorkspace() { close(); }

fiw_workspace* FlashInferWorkspace::handle() const noexcept {
  // The C layer's opaque type is this object; see src/capi.
  return closed() ? nullptr : reinterpret_cast<fiw_workspace*>(const_cast<FlashInferWorkspace*>(this));
}

void FlashInferWorkspace::close() noexcept { state_->close(); }
bool FlashInferWorkspace::closed() const noexcept { return state_->closed(); }

void FlashInferWorkspace::invalidate_runtime_cache() { state_->invalidate(WorkspaceState::Scope::kRuntime); }
void FlashInferWorkspace::invalidate_prefill_runtime_cache() { state_->invalidate(WorkspaceState::Scope::kPrefill); }
void FlashInferWorkspace::invalidate_verify_runtime_cache() { state_->invalidate(WorkspaceState::Scope::kVerify); }

PageTable FlashInferWorkspace::read_table(const DevicePageTable& table, Stream stream) {
  return state_->read_table(table, stream);
}

DecodeStep FlashInferWorkspace::plan_decode(const PageTable& table, const StepSpec& spec) {
  return state_->plan_step<DecodeStep>({.kind = PlanKind::kDecode, .table = &table}, spec);
}

PrefillStep FlashInferWorkspace::plan_prefill(std::span<const std::int32_t> qo_indptr, const PageTable& table,
                                              const StepSpec& spec) {
  return state_->plan_step<PrefillStep>({.kind = PlanKind::kPrefill, .table = &table, .qo_indptr = qo_indptr}, spec);
}

VerifyStep FlashInferWorkspace::plan_verify(std::int32_t window, const PageTable& table, const StepSpec& spec) {
  return state_->plan_step<VerifyStep>({.kind = PlanKind::kVerify, .table = &table, .uniform_qo_len = window}, spec);
}

void AttentionStep::run(const ConstTensor& q, const KvCache& kv, const Tensor& out, float* lse,
                        const AttentionExtras& extras, Stream stream) const {
  if (workspace_ == nullptr) fail(Reason::kStepMismatch, "the step was never planned");
  workspace_->run(*this, {.q = q, .kv = &kv, .out = out, .lse = lse, .extras = extras, .stream = stream});
}

void AttentionStep::check_ready() const {
  if (workspace_ == nullptr) fail(Reason::kStepMismatch, "the step was never planned");
  workspace_->check_ready();
}

PlanInfo AttentionStep::info() const {
  if (plan_ == nullptr) fail(Reason::kStepMismatch, "the step was never planned");
  const ScheduleShape& shape = plan_->shape;
  return {.batch = shape.batch,
          .items = shape.items,
          .padded_items = shape.padded_items,
          .kv_chunk_tokens = shape.split_kv ? shape.kv_chunk_tokens : 0,
          .tile_rows = shape.tile_rows,
          .split_kv = shape.split_kv,
          .cache_hit = cache_hit_,
          .schedule_bytes = shape.bytes,
          .scratch_bytes = plan_->scratch_bytes};
}

void FlashInferWorkspace::decode(const ConstTensor& q, const KvCache& kv, const PageTable& table,
                                 const AttentionParams& params, const Tensor& out, float* lse,
                                 const AttentionExtras& extras, Stream stream) {
  state_->call({.kind = PlanKind::kDecode, .table = &table},
               {.q = q, .kv = &kv, .out = out, .lse = lse, .extras = extras, .stream = stream}, params);
}

void FlashInferWorkspace::prefill(const ConstTensor& q, std::span<const std::int32_t> qo_indptr, const KvCache& kv,
                                  const PageTable& table, const AttentionParams& params, const Tensor& out, float* lse,
                                  const AttentionExtras& extras, Stream stream) {
  state_->call({.kind = PlanKind::kPrefill, .table = &table, .qo_indptr = qo_indptr},
               {.q = q, .kv = &kv, .out = out, .lse = lse, .extras = extras, .stream = stream}, params);
}

void FlashInferWorkspace::verify(const ConstTensor& q, std::int32_t window, const KvCache& kv, const PageTable& table,
                                 const AttentionParams& params, const Tensor& out, float* lse,
                                 const AttentionExtras& extras, Stream stream) {
  state_->call({.kind = PlanKind::kVerify, .table = &table, .uniform_qo_len = window},
               {.q = q, .kv = &kv, .out = out, .lse = lse, .extras = extras, .stream = stream}, params);
}

void FlashInferWorkspace::ragged_prefill(const ConstTensor& q, std::span<const std::int32_t> qo_indptr,
                                         const ConstTensor& k, const ConstTensor& v,
                                         std::span<const std::int32_t> kv_indptr, const AttentionParams& params,
                                         const Tensor& out, float* lse, const AttentionExtras& extras, Stream stream) {
  const RaggedKv ragged{.k = k, .v = v, .indptr = kv_indptr};
  state_->call({.kind = PlanKind::kRagged, .qo_indptr = qo_indptr},
               {.q = q, .ragged = &ragged, .out = out, .lse = lse, .extras = extras, .stream = stream}, params);
}

void FlashInferWorkspace::append_kv(const ConstTensor& k, const ConstTensor& v,
                                    std::span<const std::int32_t> append_indptr, const KvCache& kv,
                                    const PageTable& table, Stream stream) {
  state_->append({.k = k, .v = v, .append_indptr = append_indptr, .kv = &kv, .table = &table, .stream = stream});
}

void FlashInferWorkspace::merge_states(std::span<const PartialState> parts, const Tensor& out, float* lse,
                                       Stream stream) {
  state_->merge({.parts = parts, .out = out, .lse = lse, .stream = stream});
}

void FlashInferWorkspace::check_ready() const { state_->check_ready(); }

int FlashInferWorkspace::device_index() const noexcept { return state_->device_index(); }
const DeviceProps& FlashInferWorkspace::device_props() const noexcept { return state_->device_props(); }
WorkspaceStats FlashInferWorkspace::stats() const { return state_->stats(); }
bool FlashInferWorkspace::verify_cuda_graph() const noexcept { return state_->verify_cuda_graph(); }
bool FlashInferWorkspace::compiled_with(DeviceKind kind) noexcept {
#ifdef FIW_HAS_CUDA
  return kind == DeviceKind::kCpu || kind == DeviceKind::kCuda;
#else
  return kind == DeviceKind::kCpu;
#endif
}

}  // namespace fiw
