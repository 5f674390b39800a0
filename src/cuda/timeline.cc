// See timeline.h.
#include "cuda/timeline.h"

#include "cuda/device.h"
#include "fiw/error.h"

namespace fiw::cuda {

Timeline::Timeline() { check(cudaEventCreateWithFlags(&latest_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }

Timeline::~Timeline() { cudaEventDestroy(latest_); }

unsigned long long Timeline::enter(cudaStream_t stream) {
  unsigned long long id = 0;
  check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  if (marked_ && id != stream_id_) check(cudaStreamWaitEvent(stream, latest_, 0), "cudaStreamWaitEvent");
  return id;
}

void Timeline::leave(cudaStream_t stream, unsigned long long id) {
  stream_id_ = id;
  check(cudaEventRecord(latest_, stream), "cudaEventRecord");
  marked_ = true;
}

Timeline::Entry::Entry(Timeline& timeline, cudaStream_t stream)
    : timeline_(timeline), stream_(stream), id_(timeline.enter(stream)) {}

Timeline::Entry::~Entry() {
  if (left_) return;
  try {
    timeline_.leave(stream_, id_);
  } catch (const Error&) {
    // What ended the call is told by the exception under way.
  }
}

void Timeline::Entry::leave() {
  left_ = true;
  timeline_.leave(stream_, id_);
}

void Timeline::drain() {
  if (marked_) check(cudaEventSynchronize(latest_), "cudaEventSynchronize");
}

}  // namespace fiw::cuda
