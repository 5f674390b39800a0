// Plans and the caches that let one plan serve every layer of a step.
//
// A key holds everything that shaped the plan and is compared in full; a hash only finds the candidates. No pointer is
// part of a key: an allocator may hand the same address out again with other contents behind it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "core/arena.h"
#include "core/schedule.h"
#include "fiw/page_table.h"
#include "fiw/workspace.h"

namespace fiw {

enum class PlanKind : std::uint8_t { kDecode, kPrefill, kVerify, kRagged };

/// The part of a key that is not an array.
struct PlanTraits {
  PlanKind kind = PlanKind::kDecode;
  KernelFamily family = KernelFamily::kCpuStream;
  StepSpec spec{};  ///< with resolved params
  PlanOptions options{};
  std::int32_t page_size = 1;
  std::int32_t uniform_qo_len = 1;  ///< 1 for decode, the window for verify, 0 when qo_indptr says
  bool graph = false;

  friend bool operator==(const PlanTraits&, const PlanTraits&) = default;
};

/// A key by reference, for look-ups that allocate nothing.
struct PlanKeyView {
  PlanTraits traits;
  std::span<const std::int32_t> kv_counts;  ///< pages a request (paged) or tokens a request (ragged)
  std::span<const std::int32_t> qo_indptr;  ///< empty when uniform
  const PageTable* table = nullptr;         ///< prefill only: its contents are part of the key
  std::uint64_t hash = 0;
};

namespace detail {

/// One plan: its key, the schedule's shape, and the slice of int scratch that holds the schedule.
struct Plan {
  PlanTraits traits;
  std::vector<std::int32_t> kv_counts;
  std::vector<std::int32_t> qo_indptr;
  PageTable table;
  std::uint64_t hash = 0;

  ScheduleShape shape;
  std::size_t scratch_bytes = 0;
  ArenaSlice slice;

  bool matches(const PlanKeyView& key) const noexcept;
  void set_key(const PlanKeyView& key);
};

}  // namespace detail

/// A least-recently-used cache of plans of one scope. Dropped plans live on while a step holds them.
class PlanCache {
 public:
  explicit PlanCache(std::int32_t max_entries) : max_entries_(static_cast<std::size_t>(max_entries)) {}

  /// The plan with this key, or null. Counts a hit.
  std::shared_ptr<detail::Plan> find(const PlanKeyView& key) noexcept;
  /// An unused plan object whose buffers may be reused; not in the cache.
  std::shared_ptr<detail::Plan> blank();
  /// Enters a finished plan, dropping the least recently used one if the cache is full. Counts a miss, so that one
  /// whose plan could not be made leaves no trace.
  void insert(std::shared_ptr<detail::Plan> plan);
  /// Drops every plan.
  void invalidate() noexcept;
  /// Drops every plan and spare object; counters stay.
  void clear() noexcept;

  CacheStats stats() const noexcept;

 private:
  struct Entry {
    std::shared_ptr<detail::Plan> plan;
    std::uint64_t last_used = 0;
  };
  void retire(Entry& entry) noexcept;

  std::size_t max_entries_;
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<detail::Plan>>
      spares_;                   ///< at most max_entries_ + 1, so that a steady state allocates nothing
  const PageTable empty_table_;  ///< what spares hold, so that they keep no caller's table alive
  std::uint64_t clock_ = 0;
  CacheStats stats_;
};

}  // namespace fiw
