// How a request looks to the planners: query tiles, and the pages that a tile can see.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "core/schedule.h"
#include "fiw/device_props.h"
#include "plan/fast_div.h"
#include "plan/planner.h"

namespace fiw {

/// Packed rows of a query tile; 0 where a request is one tile. Under a fixed split it depends on no request, so that a
/// request is computed alike in every batch.
std::int32_t choose_tile_rows(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                              const SplitPolicy& policy) noexcept;
/// As above for `packed_len` packed rows a request.
std::int32_t choose_tile_rows(KernelFamily family, const DeviceProps& device, const WorkLoad& work,
                              std::int64_t packed_len) noexcept;

/// The requests of a batch, cut into query tiles of a known size.
class Tiling {
 public:
  Tiling(KernelFamily family, const WorkLoad& work, std::int32_t tile_rows) noexcept;

  std::int32_t batch() const noexcept { return work_.batch(); }
  bool uniform() const noexcept { return work_.qo_indptr.empty(); }
  std::int32_t qo_len(std::int32_t r) const noexcept { return work_.qo_len(r); }

  /// Query tiles of request r; 0 when it has no query.
  std::int32_t tiles(std::int32_t r) const noexcept { return uniform() ? uniform_tiles_ : tiles_of(qo_len(r)); }
  /// Query tiles of a request of `qo_len` tokens.
  std::int32_t tiles_of(std::int32_t qo_len) const noexcept;
  /// Pages that one tile of request r may have to walk, at least 1: an empty request is an item too.
  std::int32_t pages(std::int32_t r) const noexcept {
    return std::clamp(work_.kv_pages[r], 1, uniform() ? uniform_reach_ : reach_of(qo_len(r)));
  }
  /// Most pages that one tile of a request of `qo_len` tokens can see through the window.
  std::int32_t reach_of(std::int32_t qo_len) const noexcept;

  /// Pages of a request of `qo_len` tokens of which its rows see half on average: those of its own span.
  std::int32_t spared_span(std::int32_t qo_len) const noexcept {
    return work_.causal && work_.window_left < 0 ? qo_len / work_.page_size : 0;
  }

  /// Items when every tile is cut into chunks of `chunk_pages`.
  std::int64_t items(std::int32_t chunk_pages) const noexcept;

  /// Sums over the batch.
  struct Totals {
    std::int64_t uncut_items = 0;  ///< items when nothing is cut
    double walked_pages = 0;       ///< when every tile walks all of pages(r)
    double visible_pages = 0;      ///< less what the causal limit spares the earlier tiles
    std::int32_t longest = 1;      ///< largest pages(r) of a request with a tile
    std::int32_t max_qo_len = 0;   ///< largest qo_len(r)
  };
  Totals totals() const noexcept;

 private:
  const WorkLoad& work_;
  KernelFamily family_;
  std::int32_t tile_rows_;
  std::int32_t uniform_tiles_ = 0;
  std::int32_t uniform_reach_ = 1;
};

}  // namespace fiw
