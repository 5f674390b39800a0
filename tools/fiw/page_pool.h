// Which KV-cache pages are in use, by how many requests, and which hold a prompt prefix worth keeping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace fiw::cli {

/// Names prompt prefixes exactly: a node stands for one sequence of block hashes from a prompt's start, so two prompts
/// share a node if and only if they agree on every hash up to it.
class PrefixTree {
 public:
  static constexpr std::int32_t kRoot = 0;

  /// The node reached from `parent` by one more block.
  std::int32_t child(std::int32_t parent, std::uint64_t block_hash);

 private:
  std::map<std::pair<std::int32_t, std::uint64_t>, std::int32_t> children_;
};

/// What a page of prompt tokens holds: the page's place in the prompt, and the prefix up to the block of its last
/// token.
struct PageKey {
  std::int32_t prefix = PrefixTree::kRoot;
  std::int32_t page = 0;

  friend auto operator<=>(const PageKey&, const PageKey&) = default;
};

/// Pages with reference counts. A published page that nobody uses any more stays findable until its memory is needed;
/// the one unused longest goes first.
class PagePool {
 public:
  explicit PagePool(std::int32_t num_pages);
  /// What the accounts of one page take, without those of its prefix.
  static constexpr std::size_t bytes_per_page() noexcept { return sizeof(Page) + sizeof(std::int32_t); }

  /// A page with one reference. Precondition: available() > 0.
  std::int32_t allocate();
  /// The page published under `key`, with one more reference; nothing if there is none.
  std::optional<std::int32_t> acquire(const PageKey& key);
  /// Drops one reference.
  void release(std::int32_t page);
  /// Makes a page in use findable. The first page published under a key keeps it.
  void publish(std::int32_t page, const PageKey& key);

  /// True when `key` is published and its page is in use now, so that acquiring it takes no available page.
  bool in_use(const PageKey& key) const;
  bool contains(const PageKey& key) const { return published_.contains(key); }

  std::int32_t num_pages() const noexcept { return static_cast<std::int32_t>(pages_.size()); }
  /// Pages that allocate() could hand out: never used, returned, or kept only for their prefix.
  std::int32_t available() const noexcept { return static_cast<std::int32_t>(free_.size() + kept_.size()); }
  std::int32_t used() const noexcept { return num_pages() - available(); }
  std::int32_t peak_used() const noexcept { return peak_used_; }
  std::int32_t references(std::int32_t page) const { return pages_[page].references; }

 private:
  struct Page {
    std::int32_t references = 0;
    std::optional<PageKey> key;
    std::list<std::int32_t>::iterator kept;  ///< place in kept_ while unused and published
  };

  void note_use() noexcept;

  std::vector<Page> pages_;
  std::vector<std::int32_t> free_;
  std::list<std::int32_t> kept_;  ///< least recently used first
  std::map<PageKey, std::int32_t> published_;
  std::int32_t peak_used_ = 0;
};

}  // namespace fiw::cli
