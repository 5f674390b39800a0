// The public graph session: each call names its arguments and hands them to the state.
#include "fiw/graph.h"

#include <utility>

#include "core/fail.h"
#include "core/graph_state.h"

namespace fiw {

using detail::GraphState;

GraphSession::GraphSession(std::shared_ptr<GraphState> state) noexcept : state_(std::move(state)) {}
GraphSession::GraphSession(GraphSession&&) noexcept = default;
GraphSession& GraphSession::operator=(GraphSession&&) noexcept = default;
GraphSession::~GraphSession() = default;

// By value: what is captured may replace or destroy the session.
std::shared_ptr<GraphState> GraphSession::state() const {
  if (state_ == nullptr) fail(Reason::kOptions, "the session was moved from");
  return state_;
}

GraphSession GraphSession::decode(FlashInferWorkspace& workspace, std::span<const StepSpec> kinds,
                                  const GraphOptions& options) {
  return GraphSession(std::make_shared<GraphState>(workspace.state_, PlanKind::kDecode, 1, kinds, options));
}

GraphSession GraphSession::verify(FlashInferWorkspace& workspace, std::int32_t window, std::span<const StepSpec> kinds,
                                  const GraphOptions& options) {
  return GraphSession(std::make_shared<GraphState>(workspace.state_, PlanKind::kVerify, window, kinds, options));
}

void GraphSession::capture(std::function<void(std::int32_t batch)> body, Stream stream) {
  state()->capture(std::move(body), stream);
}

std::int32_t GraphSession::begin(std::int32_t batch, Stream stream) { return state()->begin(batch, stream); }

void GraphSession::run(const ConstTensor& q, const KvCache& kv, const Tensor& out, float* lse,
                       const AttentionExtras& extras, Stream stream, std::size_t kind) {
  state()->run({.q = q, .kv = &kv, .out = out, .lse = lse, .extras = extras, .stream = stream}, kind);
}

void GraphSession::append_kv(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, Stream stream) {
  state()->append(k, v, kv, stream);
}

std::int32_t GraphSession::prepare(const PageTable& table, Stream stream) { return state()->prepare(table, stream); }
void GraphSession::step(const PageTable& table, Stream stream) { state()->step(table, stream); }
void GraphSession::replay(std::int32_t batch, Stream stream) { state()->replay(batch, stream); }
void GraphSession::check(Stream stream) { state()->check(stream); }
void GraphSession::check_ready() const { state()->check_ready(); }
std::span<const std::int32_t> GraphSession::buckets() const noexcept {
  return state_ == nullptr ? std::span<const std::int32_t>() : state_->buckets();
}
GraphStats GraphSession::stats() const noexcept { return state_ == nullptr ? GraphStats() : state_->stats(); }

}  // namespace fiw
