// See graph.h.
#include "graph.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "attention.h"
#include "error.h"
#include "fiw/fiw.h"
#include "page_table.h"
#include "tensor.h"
#include "workspace.h"

namespace fiw::python {
namespace {

namespace nb = nanobind;
using namespace nb::literals;

using Tensors = std::vector<SharedTensor>;
using LiveTable = std::array<SharedTensor, 3>;

struct Session;

/// A step as it was captured: the function, and the tensors whose addresses were.
struct Body {
  Session& session;
  nb::callable function;
  Tensors tensors{};
  bool captured = false;
};

/// A graph with all that it refers to; made, used and destroyed with the GIL.
struct Session {
  Session(std::shared_ptr<Allocator> workspaces, fiw_graph* owned, LiveTable table)
      : allocator(std::move(workspaces)), handle(owned), live_table(std::move(table)) {}
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() {
    const nb::gil_scoped_release unlocked;
    fiw_graph_free(handle);
  }

  template <class Range>
  void keep(const Range& tensors) {
    if (recording != nullptr) recording->insert(recording->end(), tensors.begin(), tensors.end());
  }

  const std::shared_ptr<Allocator> allocator;
  fiw_graph* handle;
  LiveTable live_table;
  std::unique_ptr<Body> body;
  std::map<std::int32_t, Tensors> begun;  ///< tensors of the steps in captures of the caller's, by bucket
  Tensors* recording = nullptr;           ///< where the tensors of calls go; null in a replay
  std::thread::id capturing;
};

/// A closable reference to a session. Calls share the session, so that one may close it while it runs.
class Graph {
 public:
  explicit Graph(std::shared_ptr<Session> session) : session_(std::move(session)) {}

  std::shared_ptr<Session> open() const {
    if (session_ != nullptr) return session_;
    fiw_error error = FIW_ERROR_INIT;
    error.code = FIW_CLOSED;
    error.reason = FIW_REASON_CLOSED_WORKSPACE;
    std::strncpy(error.message, "the graph session is closed", sizeof(error.message) - 1);
    raise(error);
  }
  const Session* get() const noexcept { return session_.get(); }
  void close() noexcept { const std::shared_ptr<Session> last = std::exchange(session_, nullptr); }

 private:
  std::shared_ptr<Session> session_;
};

fiw_status call_body(void* context, std::int32_t batch) {
  const nb::gil_scoped_acquire locked;
  Body& body = *static_cast<Body*>(context);
  Tensors* const before = std::exchange(body.session.recording, body.captured ? nullptr : &body.tensors);
  // What the function raises stays this thread's pending exception until call_replaying takes it.
  const nb::object result = nb::steal(PyObject_CallFunction(body.function.ptr(), "i", batch));
  body.session.recording = before;
  return result.is_valid() ? FIW_OK : FIW_INTERNAL;
}

/// Calls `function(fiw_error*)` without the GIL. It may run a body: what that raised is raised again.
template <class Function>
void call_replaying(Function&& function) {
  call_unlocked([&](fiw_error* error) {
    const fiw_status status = function(error);
    const nb::gil_scoped_acquire locked;
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return status;
  });
}

void capture(const Graph& graph, nb::callable function, Stream stream) {
  const std::shared_ptr<Session> session = graph.open();
  const std::thread::id self = std::this_thread::get_id();
  if (session->capturing != std::thread::id() && session->capturing != self) {
    fiw_error error = FIW_ERROR_INIT;
    error.code = FIW_BUSY;
    error.reason = FIW_REASON_BUSY_WORKSPACE;
    std::strncpy(error.message, "another thread is capturing the graph session", sizeof(error.message) - 1);
    raise(error);
  }
  auto body = std::make_unique<Body>(Body{.session = *session, .function = std::move(function)});
  struct Capturing {
    Session& session;
    std::thread::id before;
    ~Capturing() { session.capturing = before; }
  } const capturing{*session, std::exchange(session->capturing, self)};
  call_replaying([&](fiw_error* error) {
    return fiw_graph_capture(session->handle, call_body, body.get(), native(stream), error);
  });
  body->captured = true;
  session->body.swap(body);
}

std::int32_t begin(const Graph& graph, std::int32_t batch, Stream stream) {
  const std::shared_ptr<Session> session = graph.open();
  std::int32_t bucket = 0;
  call_unlocked(
      [&](fiw_error* error) { return fiw_graph_begin(session->handle, batch, &bucket, native(stream), error); });
  session->recording = &session->begun[bucket];
  session->recording->clear();
  return bucket;
}

void run(const Graph& graph, SharedTensor q, const KvCache& kv, SharedTensor out, SharedTensor lse,
         const Extras* extras, std::int32_t kind, Stream stream) {
  const std::shared_ptr<Session> session = graph.open();
  call_unlocked([&](fiw_error* error) {
    return fiw_graph_run(session->handle, kind, q->dl(), &kv.c, out->dl(), dl_or_null(lse.get()), c_or_null(extras),
                         native(stream), error);
  });
  session->keep(std::array{std::move(q), std::move(out), std::move(lse)});
  session->keep(kv.tensors);
  if (extras != nullptr) session->keep(extras->tensors);
}

void append_kv(const Graph& graph, SharedTensor k, SharedTensor v, const KvCache& kv, Stream stream) {
  const std::shared_ptr<Session> session = graph.open();
  call_unlocked([&](fiw_error* error) {
    return fiw_graph_append_kv(session->handle, k->dl(), v->dl(), &kv.c, native(stream), error);
  });
  session->keep(std::array{std::move(k), std::move(v)});
  session->keep(kv.tensors);
}

std::int32_t prepare(const Graph& graph, const PageTable& table, Stream stream) {
  const std::shared_ptr<Session> session = graph.open();
  std::int32_t bucket = 0;
  call_unlocked([&, pages = table.handle()](fiw_error* error) {
    return fiw_graph_prepare(session->handle, pages.get(), &bucket, native(stream), error);
  });
  return bucket;
}

Fields stats(const Graph& graph) {
  const std::shared_ptr<Session> session = graph.open();
  fiw_graph_stats stats = FIW_GRAPH_STATS_INIT;
  call([&](fiw_error* error) { return fiw_graph_get_stats(session->handle, &stats, error); });
  Fields result;
  result["captures"] = stats.captures;
  result["replays"] = stats.replays;
  result["plans"] = stats.plans;
  result["plan_hits"] = stats.plan_hits;
  result["trips"] = stats.trips;
  result["bytes"] = stats.bytes;
  return result;
}

Graph create(const Workspace& workspace, std::int32_t window, const std::vector<const fiw_step_spec*>& kinds,
             std::int32_t max_batch, std::int32_t max_pages, std::int32_t page_size, std::int64_t num_pages,
             const Tensor* buckets, SharedTensor indptr, SharedTensor indices, SharedTensor last_page_len,
             bool plan_on_device) {
  fiw_device_page_table live = FIW_DEVICE_PAGE_TABLE_INIT;
  live.page_size = page_size;
  live.num_pages = num_pages;
  live.indptr = dl_or_null(indptr.get());
  live.indices = dl_or_null(indices.get());
  live.last_page_len = dl_or_null(last_page_len.get());
  fiw_graph_options options = FIW_GRAPH_OPTIONS_INIT;
  options.num_pages = num_pages;
  options.kinds = kinds.data();
  options.buckets = dl_or_null(buckets);
  options.live_table = indptr == nullptr ? nullptr : &live;
  options.num_kinds = static_cast<std::int32_t>(kinds.size());
  options.window = window;
  options.max_batch = max_batch;
  options.max_pages = max_pages;
  options.page_size = page_size;
  options.plan_on_device = plan_on_device ? 1 : 0;
  fiw_graph* handle = nullptr;
  call_unlocked([&](fiw_error* error) { return fiw_graph_create(workspace.get(), &options, &handle, error); });
  return Graph(std::make_shared<Session>(workspace.allocator, handle,
                                         LiveTable{std::move(indptr), std::move(indices), std::move(last_page_len)}));
}

// A captured function usually refers to its session: the collector has to see through that cycle.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  const Session* const session = nb::inst_ptr<Graph>(self)->get();
  if (session != nullptr && session->body != nullptr) Py_VISIT(session->body->function.ptr());
  return 0;
}

int clear(PyObject* self) {
  nb::inst_ptr<Graph>(self)->close();
  return 0;
}

PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

}  // namespace

void bind_graph(nb::module_& module) {
  nb::class_<Graph>(module, "Graph", nb::type_slots(slots), "A graph session; keeps what was captured alive.")
      .def_static("create", &create, "workspace"_a, "window"_a, "kinds"_a, "max_batch"_a, "max_pages"_a, "page_size"_a,
                  "num_pages"_a, "buckets"_a.none(), "indptr"_a.none(), "indices"_a.none(), "last_page_len"_a.none(),
                  "plan_on_device"_a)
      .def("capture", &capture, "body"_a, "stream"_a)
      .def("begin", &begin, "batch"_a, "stream"_a)
      .def("run", &run, "q"_a, "kv"_a, "out"_a, "lse"_a.none(), "extras"_a.none(), "kind"_a, "stream"_a)
      .def("append_kv", &append_kv, "k"_a, "v"_a, "kv"_a, "stream"_a)
      .def("prepare", &prepare, "table"_a, "stream"_a)
      .def(
          "step",
          [](const Graph& graph, const PageTable& table, Stream stream) {
            const std::shared_ptr<Session> session = graph.open();
            call_replaying([&, pages = table.handle()](fiw_error* error) {
              return fiw_graph_step(session->handle, pages.get(), native(stream), error);
            });
          },
          "table"_a, "stream"_a)
      .def(
          "replay",
          [](const Graph& graph, std::int32_t batch, Stream stream) {
            const std::shared_ptr<Session> session = graph.open();
            call_replaying(
                [&](fiw_error* error) { return fiw_graph_replay(session->handle, batch, native(stream), error); });
          },
          "batch"_a, "stream"_a)
      .def(
          "check",
          [](const Graph& graph, Stream stream) {
            const std::shared_ptr<Session> session = graph.open();
            call_unlocked([&](fiw_error* error) { return fiw_graph_check(session->handle, native(stream), error); });
          },
          "stream"_a)
      .def("buckets",
           [](const Graph& graph) {
             const std::shared_ptr<Session> session = graph.open();
             const std::int32_t* const first = fiw_graph_buckets(session->handle);
             return std::vector<std::int32_t>(first, first + fiw_graph_num_buckets(session->handle));
           })
      .def("stats", &stats)
      .def("close", &Graph::close)
      .def("closed", [](const Graph& graph) { return graph.get() == nullptr; });
}

}  // namespace fiw::python
