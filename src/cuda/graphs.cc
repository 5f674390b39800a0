// See graphs.h.
#include "cuda/graphs.h"

#include "core/fail.h"
#include "cuda/device.h"
#include "cuda/replan/replan.h"

namespace fiw::cuda {

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

namespace {

void refuse_capture(cudaStream_t stream) {
  if (!is_capturing(stream)) return;
  fail(Reason::kOptions,
       "stream is being captured: a session's steps are recorded by begin() and run(), not prepared or replayed");
}

}  // namespace

class Graphs::ExecutableGraph final : public Recording {
 public:
  ExecutableGraph(int device, Timeline& timeline, cudaGraph_t graph) : device_(device), timeline_(timeline) {
    check(cudaGraphInstantiate(&graph_, graph, 0), "cudaGraphInstantiate");
  }
  ~ExecutableGraph() override {
    const DeviceGuard guard(device_);
    try {
      timeline_.drain();  // it may be running
    } catch (const Error&) {
      // On a lost device nothing runs.
    }
    cudaGraphExecDestroy(graph_);
  }

  cudaGraphExec_t get() const noexcept { return graph_; }

 private:
  const int device_;
  Timeline& timeline_;
  cudaGraphExec_t graph_ = nullptr;
};

void Graphs::follow(Stream stream) {
  const DeviceGuard guard(device_);
  const auto on = static_cast<cudaStream_t>(stream);
  refuse_capture(on);
  timeline_.enter(on);
}

void Graphs::settle() {
  const DeviceGuard guard(device_);
  const RelaxedCapture relaxed(true);  // another thread may be capturing
  timeline_.drain();
}

void Graphs::begin(Stream stream) {
  const DeviceGuard guard(device_);
  if (stream == nullptr) fail(Reason::kOptions, "stream is null, and CUDA captures no default stream");
  // Relaxed: a kernel may be loaded at its first use, and other threads go on with what they do.
  check(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream), cudaStreamCaptureModeRelaxed),
        "cudaStreamBeginCapture");
}

std::unique_ptr<GraphBackend::Recording> Graphs::end(Stream stream) {
  const DeviceGuard guard(device_);
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph), "cudaStreamEndCapture");
  struct Destroy {
    cudaGraph_t graph;
    ~Destroy() { cudaGraphDestroy(graph); }
  } destroy{graph};
  return std::make_unique<ExecutableGraph>(device_, timeline_, graph);
}

void Graphs::abandon(Stream stream) noexcept {
  const DeviceGuard guard(device_);
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();  // what ended the capture is told by the exception under way
}

std::uint64_t Graphs::recording_on(Stream stream) const {
  const DeviceGuard guard(device_);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id), "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusActive) return id;
  fail(
      Reason::kOptions,
      "stream is not being captured, as it must be for run() and append_kv(): they are for capture()'s body and, after "
      "begin(), for a capture of the caller's");
}

void Graphs::replay(const Recording& recording, Stream stream) {
  const DeviceGuard guard(device_);
  const auto on = static_cast<cudaStream_t>(stream);
  if (is_capturing(on)) {
    fail(Reason::kOptions,
         "stream is being captured: a session's steps are recorded by begin() and run(), not replayed");
  }
  const unsigned long long id = timeline_.enter(on);
  check(cudaGraphLaunch(static_cast<const ExecutableGraph&>(recording).get(), on), "cudaGraphLaunch");
  timeline_.leave(on, id);
}

std::shared_ptr<GraphAlarm> Graphs::make_alarm() {
  const DeviceGuard guard(device_);
  void* memory = nullptr;
  check(cudaHostAlloc(&memory, sizeof(GraphAlarm), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  return {new (memory) GraphAlarm, [](GraphAlarm* alarm) { cudaFreeHost(alarm); }};
}

void Graphs::replan(const ReplanLaunch& launch) {
  const DeviceGuard guard(device_);
  if (launch.parts.size() > kMostParts) {
    fail(Reason::kOptions, "a live table serves up to {} kinds of layers, the session has {}", kMostParts,
         launch.parts.size());
  }
  if (launch.batch > kMostRequests) {
    fail(Reason::kBatch, "a live table serves up to {} requests, the bucket has {}", kMostRequests, launch.batch);
  }
  const RelaxedCapture relaxed(true);
  check(cuda::replan(launch, static_cast<cudaStream_t>(launch.stream)), "launching the planning kernel");
}

}  // namespace fiw::cuda
