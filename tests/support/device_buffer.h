// Memory on the device under test, with a copy on the host. Only this file knows how a device's memory is reached.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "fiw/types.h"

namespace fiw::test {

/// CUDA devices that this machine has and this build can use.
int device_count();

/// Waits for all work of a device.
void synchronize(int device);

/// `bytes` of memory on one device; exactly that many, so that an address sanitizer sees an overrun.
class DeviceBuffer {
 public:
  DeviceBuffer(int device, std::size_t bytes);

  int device() const { return device_; }
  std::byte* data() const { return memory_.get(); }
  std::size_t size() const { return bytes_; }
  void write(std::span<const std::byte> host);
  void read(std::span<std::byte> host) const;

 private:
  struct Free {
    int device = kCpuDevice;
    void operator()(std::byte* memory) const;
  };
  int device_;
  std::size_t bytes_;
  std::unique_ptr<std::byte, Free> memory_;
};

/// An array that lives on the host, where the reference reads it, and on the device, where the library does.
template <class T>
class Mirror {
 public:
  Mirror(int device, std::size_t count) : host_(count), device_(device, count * sizeof(T)) {}
  Mirror(int device, std::vector<T> values) : Mirror(device, values.size()) {
    host_ = std::move(values);
    upload();
  }

  std::vector<T>& host() { return host_; }
  const std::vector<T>& host() const { return host_; }
  T* device() const { return reinterpret_cast<T*>(device_.data()); }
  void upload() { device_.write(std::as_bytes(std::span(host_))); }
  void download() { read(host_); }
  /// The device's copy, leaving the host's alone.
  void read(std::span<T> into) const { device_.read(std::as_writable_bytes(into)); }

 private:
  std::vector<T> host_;
  DeviceBuffer device_;
};

}  // namespace fiw::test
