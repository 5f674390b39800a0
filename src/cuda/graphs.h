// CUDA graphs of a workspace's calls.
#pragma once

#include <cuda_runtime_api.h>

#include "core/graph_backend.h"
#include "cuda/timeline.h"

namespace fiw::cuda {

class Graphs final : public GraphBackend {
 public:
  /// Replays are part of `timeline`, which must outlive this.
  Graphs(int device, Timeline& timeline) : device_(device), timeline_(timeline) {}

  void follow(Stream stream) override;
  void settle() override;
  void begin(Stream stream) override;
  std::unique_ptr<Recording> end(Stream stream) override;
  void abandon(Stream stream) noexcept override;
  std::uint64_t recording_on(Stream stream) const override;
  void replay(const Recording& recording, Stream stream) override;
  std::shared_ptr<GraphAlarm> make_alarm() override;
  void replan(const ReplanLaunch& launch) override;

 private:
  class ExecutableGraph;

  const int device_;
  Timeline& timeline_;
};

/// Whether `stream` is recording instead of running.
bool is_capturing(cudaStream_t stream);

}  // namespace fiw::cuda
