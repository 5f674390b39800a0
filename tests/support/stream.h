// A stream of a test's own: null on the CPU.
#pragma once

#include "fiw/types.h"

namespace fiw::test {

class TestStream {
 public:
  explicit TestStream(int device);
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream();

  Stream get() const { return stream_; }

 private:
  Stream stream_ = nullptr;
};

}  // namespace fiw::test
