// One workspace's device work as one sequence, whatever streams it is enqueued on.
#pragma once

#include <cuda_runtime_api.h>

namespace fiw::cuda {

/// A workspace's calls share scratch, plans and tables, so each must see the ones before it done. `enter` makes a
/// stream wait for all earlier work where that was on another stream; `leave` marks the work just enqueued as the
/// latest. Streams are told apart by their ids: a handle may be handed out again.
class Timeline {
 public:
  Timeline();
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;
  ~Timeline();

  /// Returns the stream's id, for leave().
  unsigned long long enter(cudaStream_t stream);
  void leave(cudaStream_t stream, unsigned long long id);
  class Entry;
  /// Blocks the host until all work is done.
  void drain();

 private:
  cudaEvent_t latest_ = nullptr;
  unsigned long long stream_id_ = 0;
  bool marked_ = false;
};

/// A call's place in the timeline. Where the call fails half way, what it has enqueued is followed all the same.
class Timeline::Entry {
 public:
  Entry(Timeline& timeline, cudaStream_t stream);
  Entry(const Entry&) = delete;
  Entry& operator=(const Entry&) = delete;
  ~Entry();
  /// At the end of a call: throws where the destructor could not.
  void leave();

 private:
  Timeline& timeline_;
  const cudaStream_t stream_;
  const unsigned long long id_;
  bool left_ = false;
};

}  // namespace fiw::cuda
