// Graph sessions in C.
#include "fiw/graph.h"

#include <cstring>
#include <functional>
#include <vector>

#include "capi/convert.h"

struct fiw_graph {
  fiw::GraphSession session;
};

namespace {

namespace capi = fiw::capi;
using fiw::Reason;

fiw::GraphSession& session_of(fiw_graph* graph) {
  fiw::GraphSession& session = capi::require(graph, "graph").session;
  session.check_ready();
  return session;
}

std::vector<fiw::StepSpec> kinds_of(const fiw_graph_options& given) {
  if (given.num_kinds < 1) {
    fiw::fail(Reason::kOptions, "options.num_kinds is {}, expected at least 1", given.num_kinds);
  }
  capi::require(given.kinds, "options.kinds");
  std::vector<fiw::StepSpec> kinds;
  kinds.reserve(static_cast<std::size_t>(given.num_kinds));
  for (std::int32_t i = 0; i < given.num_kinds; ++i) {
    kinds.push_back(capi::step_spec(fmt::format("options.kinds[{}]", i).c_str(), given.kinds[i]));
  }
  return kinds;
}

fiw::GraphOptions to_options(const fiw_graph_options& given, int device) {
  const auto buckets = capi::optional_host_indices("options.buckets", given.buckets);
  fiw::GraphOptions options{.max_batch = given.max_batch,
                            .max_pages = given.max_pages,
                            .page_size = given.page_size,
                            .num_pages = given.num_pages,
                            .buckets = {buckets.begin(), buckets.end()},
                            .plan_on_device = given.plan_on_device != 0};
  if (given.live_table != nullptr) {
    options.live_table = capi::device_page_table("options.live_table", given.live_table, device);
  }
  return options;
}

/// The caller's body as the session calls it: what it returns passes through the session as an error.
std::function<void(std::int32_t)> wrap(fiw_graph_body body, void* context) {
  if (body == nullptr) fiw::fail(Reason::kOptions, "body is null, expected a function");
  return [body, context](std::int32_t batch) {
    const fiw_status status = body(context, batch);
    std::int32_t code = 0;  // any number may come, and an enumeration must not hold one that it does not name
    std::memcpy(&code, &status, sizeof(code));
    if (code == FIW_OK) return;
    throw fiw::Error(fiw::Status{code}, Reason::kNone,
                     fmt::format("body returned {} ({}) for {} requests", code, fiw_status_name(status), batch));
  };
}

void put_bucket(std::int32_t* bucket, std::int32_t value) {
  if (bucket != nullptr) *bucket = value;
}

}  // namespace

fiw_status fiw_graph_create(fiw_workspace* ws, const fiw_graph_options* options, fiw_graph** out, fiw_error* err) {
  return capi::hand_out(ws, out, err, [&](fiw::FlashInferWorkspace& workspace) {
    const fiw_graph_options& given = capi::require_struct(options, "options");
    const std::vector<fiw::StepSpec> kinds = kinds_of(given);
    const fiw::GraphOptions converted = to_options(given, workspace.device_index());
    return new fiw_graph{given.window == 0 ? fiw::GraphSession::decode(workspace, kinds, converted)
                                           : fiw::GraphSession::verify(workspace, given.window, kinds, converted)};
  });
}

void fiw_graph_free(fiw_graph* graph) { delete graph; }

fiw_status fiw_graph_capture(fiw_graph* graph, fiw_graph_body body, void* context, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    fiw::GraphSession& session = session_of(graph);
    session.capture(wrap(body, context), stream);
  });
}

fiw_status fiw_graph_begin(fiw_graph* graph, int32_t batch, int32_t* bucket, void* stream, fiw_error* err) {
  return capi::guard(err, [&] { put_bucket(bucket, session_of(graph).begin(batch, stream)); });
}

fiw_status fiw_graph_run(fiw_graph* graph, int32_t kind, const DLTensor* q, const fiw_kv_cache* kv, const DLTensor* out,
                         const DLTensor* lse, const fiw_attention_extras* extras, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    fiw::GraphSession& session = session_of(graph);
    if (kind < 0) fiw::fail(Reason::kOptions, "kind is {}, expected at least 0", kind);
    const capi::PagedCall call = capi::paged_call(q, kv, session.buckets().back(), out, lse, extras);
    session.run(call.q, call.kv, call.out, call.lse, call.extras, stream, static_cast<std::size_t>(kind));
  });
}

fiw_status fiw_graph_append_kv(fiw_graph* graph, const DLTensor* k, const DLTensor* v, const fiw_kv_cache* kv,
                               void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    fiw::GraphSession& session = session_of(graph);
    session.append_kv(capi::tensor("k", k), capi::tensor("v", v), capi::kv_cache(kv), stream);
  });
}

fiw_status fiw_graph_prepare(fiw_graph* graph, const fiw_page_table* table, int32_t* bucket, void* stream,
                             fiw_error* err) {
  return capi::guard(err, [&] {
    fiw::GraphSession& session = session_of(graph);
    put_bucket(bucket, session.prepare(capi::page_table(table), stream));
  });
}

fiw_status fiw_graph_step(fiw_graph* graph, const fiw_page_table* table, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    fiw::GraphSession& session = session_of(graph);
    session.step(capi::page_table(table), stream);
  });
}

fiw_status fiw_graph_replay(fiw_graph* graph, int32_t batch, void* stream, fiw_error* err) {
  return capi::guard(err, [&] { session_of(graph).replay(batch, stream); });
}

fiw_status fiw_graph_check(fiw_graph* graph, void* stream, fiw_error* err) {
  return capi::guard(err, [&] { session_of(graph).check(stream); });
}

int32_t fiw_graph_num_buckets(const fiw_graph* graph) {
  return graph == nullptr ? 0 : static_cast<int32_t>(graph->session.buckets().size());
}

const int32_t* fiw_graph_buckets(const fiw_graph* graph) {
  return graph == nullptr ? nullptr : graph->session.buckets().data();
}

fiw_status fiw_graph_get_stats(const fiw_graph* graph, fiw_graph_stats* stats, fiw_error* err) {
  return capi::guard(err, [&] {
    const fiw::GraphStats now = capi::require(graph, "graph").session.stats();
    capi::require_struct(stats, "stats") = {.struct_size = sizeof(fiw_graph_stats),
                                            .captures = now.captures,
                                            .replays = now.replays,
                                            .plans = now.plans,
                                            .plan_hits = now.plan_hits,
                                            .trips = now.trips,
                                            .bytes = now.bytes};
  });
}
