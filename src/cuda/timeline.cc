// See timeline.h.
#include "cuda/timeline.h"

#include "cuda/device.h"
#include "fiw/error.h"

namespace fiw::cuda {

Timeline::Timeline() { check(cudaEventCreateWithFlags(&latest_, cudaEventDisableTiming), "cudaEventCreateWithFlags"); }

Timeline::~Timeline() { cudaEventDestroy(latest_); }

void Timeline::enter(cudaStream_t stream) {
  if (!marked_) return;
  unsigned long long id = 0;
  check(cudaStreamGetId(stream, &id), "cudaStreamGetId");
  if (id != stream_id_) check(cudaStreamWaitEvent(stream, latest_, 0), "cudaStreamWaitEvent");
}

void Timeline::leave(cudaStream_t stream) {
  check(cudaStreamGetId(stream, &stream_id_), "cudaStreamGetId");
  check(cudaEventRecord(latest_, stream), "cudaEventRecord");
  marked_ = true;
}

Timeline::Entry::Entry(Timeline& timeline, cudaStream_t stream) : timeline_(timeline), stream_(stream) {
  timeline_.enter(stream_);
}

Timeline::Entry::~Entry() {
  if (left_) return;
  try {
    timeline_.leave(stream_);
  } catch (const Error&) {
    // What ended the call is told by the exception under way.
  }
}

void Timeline::Entry::leave() {
  left_ = true;
  timeline_.leave(stream_);
}

void Timeline::drain() {
  if (marked_) check(cudaEventSynchronize(latest_), "cudaEventSynchronize");
}

}  // namespace fiw::cuda
