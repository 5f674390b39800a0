// See graph_state.h.
#include "core/graph_state.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#include "core/allocate.h"
#include "core/exclusive.h"
#include "core/fail.h"
#include "core/support.h"
#include "core/work.h"
#include "plan/live_table.h"

namespace fiw::detail {
namespace {

constexpr std::size_t kAlignment = 256;
constexpr std::int32_t kMaxWindow = 4096;
constexpr std::int32_t kMaxBatch = 1 << 24;

constexpr std::size_t align_up(std::size_t bytes) noexcept {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

void check_graph_options(const GraphOptions& options, std::int32_t window, std::size_t kinds) {
  const auto at_least = [](const char* name, std::int64_t value, std::int64_t least) {
    if (value < least) fail(Reason::kOptions, "{} is {}, expected at least {}", name, value, least);
  };
  if (kinds == 0) fail(Reason::kOptions, "kinds is empty, expected at least 1 kind of layer");
  if (window < 1 || window > kMaxWindow) {
    fail(Reason::kQoIndptr, "window is {}, expected 1..{} tokens a request", window, kMaxWindow);
  }
  if (options.max_batch < 1 || options.max_batch > kMaxBatch) {
    fail(Reason::kOptions, "max_batch is {}, expected 1..{}", options.max_batch, kMaxBatch);
  }
  at_least("max_pages", options.max_pages, 1);
  at_least("page_size", options.page_size, 1);
  at_least("num_pages", options.num_pages, 1);
  if (std::int64_t{options.max_batch} * window > std::numeric_limits<std::int32_t>::max()) {
    fail(Reason::kSizeOverflow, "max_batch is {} and window {}: their product does not fit 32 bits", options.max_batch,
         window);
  }
  if (std::int64_t{options.max_pages} * options.page_size > kMostTableSlots) {
    fail(Reason::kSizeOverflow, "max_pages is {} and page_size {}: 32 bits do not number so many slots",
         options.max_pages, options.page_size);
  }
  std::int32_t below = 0;
  for (const std::int32_t bucket : options.buckets) {
    if (bucket <= below || bucket > options.max_batch) {
      fail(Reason::kOptions, "buckets hold {} after {}, expected ascending values up to max_batch = {}", bucket, below,
           options.max_batch);
    }
    below = bucket;
  }
  if (!options.buckets.empty() && below != options.max_batch) {
    fail(Reason::kOptions, "the last of buckets is {}, expected max_batch = {}", below, options.max_batch);
  }
  if (!options.live_table) return;
  const DevicePageTable& table = *options.live_table;
  const auto holds = [](const char* name, std::span<const std::int32_t> array, std::int64_t entries) {
    if (std::ssize(array) < entries || array.data() == nullptr) {
      fail(Reason::kIndptrLength, "live_table.{} has {} entries, expected {}", name, array.size(), entries);
    }
  };
  holds("indptr", table.indptr, std::int64_t{options.max_batch} + 1);
  holds("indices", table.indices, options.max_pages);
  holds("last_page_len", table.last_page_len, options.max_batch);
  if (table.page_size != options.page_size || table.num_pages != options.num_pages) {
    fail(Reason::kPageSize, "live_table has pages of {} tokens, {} of them; expected {} and {}, as the session",
         table.page_size, table.num_pages, options.page_size, options.num_pages);
  }
}

std::vector<std::int32_t> buckets_of(const GraphOptions& options) {
  if (!options.buckets.empty()) return options.buckets;
  std::vector<std::int32_t> buckets;
  for (std::int64_t size = 1; size < options.max_batch; size *= 2) buckets.push_back(static_cast<std::int32_t>(size));
  buckets.push_back(options.max_batch);
  return buckets;
}

/// Whether what was captured for one shape reads the other rightly.
bool same_layout(const ScheduleShape& a, const ScheduleShape& b) {
  return a.family == b.family && a.padded_items == b.padded_items && a.padded_rows == b.padded_rows &&
         a.tile_rows == b.tile_rows && a.split_kv == b.split_kv && a.partial_rows == b.partial_rows &&
         a.o_indptr == b.o_indptr && a.merge_indptr == b.merge_indptr && a.kv_chunk_size == b.kv_chunk_size &&
         a.arrivals == b.arrivals && a.bytes == b.bytes;
}

std::string describe(const GraphAlarm& alarm) {
  const auto r = alarm.request;
  switch (static_cast<Reason>(alarm.reason)) {
    case Reason::kBatch:
      return fmt::format("the bucket of {} requests was replayed, the plan was made for that of {}", alarm.found,
                         alarm.expected);
    case Reason::kStaleTable:
      return fmt::format("request {} has {} pages, the plan was made for {}", r, alarm.found, alarm.expected);
    case Reason::kIndptrStart:
      return fmt::format("indptr[0] is {}, expected 0", alarm.found);
    case Reason::kIndptrDecreasing:
      return fmt::format("indptr[{}] is {}, below indptr[{}] = {}", r + 1, alarm.found, r, alarm.expected);
    case Reason::kTableSize:
      return fmt::format("request {} ends at page table entry {}, max_pages is {}", r, alarm.found, alarm.expected);
    case Reason::kLastPageLen:
      return fmt::format("last_page_len[{}] is {}, expected 1..{}", r, alarm.found, alarm.expected);
    case Reason::kKvLens:
      return fmt::format("request {} has {} pages, whose tokens 32 bits do not count; expected at most {}", r,
                         alarm.found, alarm.expected);
    case Reason::kPageIndex:
      return fmt::format("request {} owns page {}, expected 0..{}", r, alarm.found, alarm.expected);
    default:
      return fmt::format("request {} cannot be planned: reason {}", r, alarm.reason);
  }
}

}  // namespace

class GraphState::InBody {
 public:
  explicit InBody(GraphState& graph) noexcept : graph_(graph) {}
  InBody(const InBody&) = delete;
  InBody& operator=(const InBody&) = delete;
  ~InBody() {
    const Turn turn(graph_.workspace_->busy_);
    graph_.active_ = kNoBucket;
    graph_.step_stream_ = nullptr;
    graph_.computing_ = false;
    graph_.in_body_ = {};
  }

 private:
  GraphState& graph_;
};

// Under the lock, since another thread may be closing the workspace.
std::shared_ptr<Backend> GraphState::backend_of(WorkspaceState& workspace) {
  const Exclusive exclusive(workspace.busy_);
  workspace.check_open();
  return workspace.backend_;
}

GraphState::GraphState(std::shared_ptr<WorkspaceState> workspace, PlanKind kind, std::int32_t window,
                       std::span<const StepSpec> kinds, const GraphOptions& options)
    : workspace_(std::move(workspace)),
      backend_(backend_of(*workspace_)),
      graphs_(backend_->graphs()),
      kind_(kind),
      window_(window),
      options_(options) {
  const Exclusive exclusive(workspace_->busy_);
  workspace_->check_open();
  check_graph_options(options, window, kinds.size());
  buckets_ = buckets_of(options);
  for (const std::int32_t batch : buckets_) {
    const std::vector<std::int32_t> zeros(static_cast<std::size_t>(batch) + 1);
    blanks_.push_back(
        PageTable::from_csr(options.page_size, options.num_pages, zeros, {}, std::span(zeros).first(zeros.size() - 1)));
  }
  for (std::int32_t r = 0; r <= options_.max_batch; ++r) qo_indptr_.push_back(r * window_);
  for (const StepSpec& spec : kinds) add_kind(spec);
  next_.resize(kinds_.size());
  lay_out();
  alarm_ = graphs_ != nullptr ? graphs_->make_alarm() : std::make_shared<GraphAlarm>();

  memory_ = allocate_or_throw(*backend_, memory_bytes_, "a graph", nullptr);
  try {
    scratch_ = allocate_or_throw(*backend_, scratch_bytes_, "a graph", nullptr);
    // A schedule of zeros has no work: a replay that nothing was prepared for computes nothing.
    const std::span<std::byte> staged = backend_->stage(memory_, memory_bytes_);
    std::ranges::fill(staged, std::byte{0});
    std::ranges::copy(qo_indptr_, reinterpret_cast<std::int32_t*>(staged.data() + table_.qo_indptr));
    backend_->upload(memory_, staged, nullptr);
    if (graphs_ != nullptr) graphs_->settle();  // what nothing orders before the first replay of a caller's own graph
  } catch (...) {
    if (scratch_ != nullptr) backend_->release(scratch_, scratch_bytes_, nullptr);
    backend_->release(memory_, memory_bytes_, nullptr);
    throw;
  }
}

GraphState::~GraphState() {
  const Turn turn(workspace_->busy_);
  recordings_.clear();
  backend_->release(scratch_, scratch_bytes_, nullptr);
  backend_->release(memory_, memory_bytes_, nullptr);
}

void GraphState::add_kind(const StepSpec& spec) {
  Kind kind;
  const WorkspaceOptions& options = workspace_->options();
  kind.traits = {.kind = kind_,
                 .spec = support::resolve(spec),
                 .options = options.plan,
                 .page_size = options_.page_size,
                 .uniform_qo_len = window_,
                 .graph = true};
  kind.traits.family = backend_->route({.spec = kind.traits.spec,
                                        .page_size = options_.page_size,
                                        .max_qo_len = window_,
                                        .total_rows = std::int64_t{window_} * options_.max_batch,
                                        .batch = options_.max_batch,
                                        .graph = true});
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    page_counts_.assign(static_cast<std::size_t>(buckets_[bucket]), 0);
    kind.shapes.push_back(
        shape_schedule(kind.traits.family, workspace_->props_, work_of(kind), policy_of(kind, bucket)));
    kind.scratch_bytes = std::max(kind.scratch_bytes, backend_->scratch_bytes(kind.shapes.back(), kind.traits.spec));
  }
  kinds_.push_back(std::move(kind));
}

WorkLoad GraphState::work_of(const Kind& kind) const { return work_load(kind.traits, page_counts_, {}); }

SplitPolicy GraphState::policy_of(const Kind& kind, std::size_t bucket) const {
  SplitPolicy policy = split_policy(kind.traits.options, true);
  policy.max_batch = buckets_[bucket];
  policy.max_pages = options_.max_pages;
  return policy;
}

void GraphState::lay_out() {
  std::size_t end = 0;
  const auto ints = [&](std::size_t count) { return std::exchange(end, end + count * sizeof(std::int32_t)); };
  const auto batch = static_cast<std::size_t>(options_.max_batch);
  table_.qo_indptr = ints(batch + 1);
  for (Kind& kind : kinds_) {
    end = align_up(end);
    kind.offset = end;
    std::size_t bytes = 0;
    for (const ScheduleShape& shape : kind.shapes) bytes = std::max(bytes, shape.bytes);
    end += bytes;
    scratch_bytes_ = std::max({scratch_bytes_, kind.scratch_bytes, std::size_t{1}});
  }
  end = align_up(end);
  table_.prepared = ints(1 + 2 * kinds_.size());
  table_.indptr = ints(batch + 1);
  table_.last_page_len = ints(batch);
  table_.kv_lens = ints(batch);
  table_.indices = ints(static_cast<std::size_t>(options_.max_pages));
  memory_bytes_ = align_up(end);
}

std::size_t GraphState::bucket_of(std::int32_t batch) const {
  const auto found = std::ranges::lower_bound(buckets_, batch);
  if (batch < 0 || found == buckets_.end()) {
    fail(Reason::kBatch, "the step has {} requests, the session was made for max_batch = {}", batch,
         options_.max_batch);
  }
  return static_cast<std::size_t>(found - buckets_.begin());
}

std::uint64_t GraphState::epoch() const noexcept {
  return kind_ == PlanKind::kVerify ? workspace_->verify_epoch_ : workspace_->runtime_epoch_;
}

void GraphState::check_outside(const char* call) const {
  check_open();
  if (in_body_ == std::thread::id()) return;
  if (in_body_ != std::this_thread::get_id()) throw_busy();
  fail(Reason::kOptions, "{} is called within capture()'s body, where only run() and append_kv() belong", call);
}

void GraphState::check_prepared(std::size_t bucket) const {
  if (prepared_.bucket == bucket) return;
  fail(Reason::kBatch, "the bucket of {} requests is to be replayed, which is not the one prepared last",
       buckets_[bucket]);
}

void GraphState::throw_if_stale() {
  const std::uint32_t trips = std::atomic_ref(alarm_->trips).load(std::memory_order_acquire);
  if (trips == seen_trips_) return;
  stats_.trips += trips - seen_trips_;
  seen_trips_ = trips;
  const auto reason = static_cast<Reason>(alarm_->reason);
  throw Error(Status::kStalePlan, reason, "a replay found no plan for its page table: " + describe(*alarm_))
      .at(reason == Reason::kBatch ? -1 : alarm_->request);
}

void GraphState::capture(Body body, Stream stream) {
  {
    const Exclusive exclusive(workspace_->busy_);
    check_outside("capture()");
    if (!body) fail(Reason::kOptions, "body is empty, expected a function that enqueues a step");
    in_body_ = std::this_thread::get_id();
  }
  const InBody in_body(*this);
  std::vector<std::unique_ptr<GraphBackend::Recording>> recordings;
  for (std::size_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    bool recording = false;
    try {
      {
        const Turn turn(workspace_->busy_);
        check_open();
        if (graphs_ != nullptr) {
          graphs_->begin(stream);
          recording = true;
        }
        open_step(bucket, stream);
      }
      body(buckets_[bucket]);
      if (recording) recordings.push_back(graphs_->end(stream));
    } catch (...) {
      if (recording) graphs_->abandon(stream);
      const Turn turn(workspace_->busy_);
      recordings.clear();
      throw;
    }
  }
  const Turn turn(workspace_->busy_);
  recordings_ = std::move(recordings);
  body_ = std::move(body);
  stats_.captures += buckets_.size();
}

std::int32_t GraphState::begin(std::int32_t batch, Stream stream) {
  const Exclusive exclusive(workspace_->busy_);
  check_outside("begin()");
  const std::size_t bucket = bucket_of(batch);
  open_step(bucket, stream);
  if (graphs_ == nullptr) {
    // The step is the one that the caller prepared, or that the live table tells of now.
    computing_ =
        (planned_by_replay() || prepared_.bucket == bucket) && (!options_.live_table || read_live_table(bucket));
  }
  return buckets_[bucket];
}

void GraphState::open_step(std::size_t bucket, Stream stream) {
  active_ = kNoBucket;
  computing_ = false;
  if (graphs_ != nullptr) recording_ = graphs_->recording_on(stream);
  enqueue_head(bucket, stream);
  active_ = bucket;
  step_stream_ = stream;
}

FixedTable GraphState::fixed_table() const noexcept {
  const auto ints = [&](std::size_t offset) { return reinterpret_cast<const std::int32_t*>(memory_ + offset); };
  FixedTable table{.qo_indptr = ints(table_.qo_indptr),
                   .indptr = ints(table_.indptr),
                   .indices = ints(table_.indices),
                   .last_page_len = ints(table_.last_page_len),
                   .kv_lens = ints(table_.kv_lens)};
  if (options_.live_table) {
    table.indptr = options_.live_table->indptr.data();
    table.indices = options_.live_table->indices.data();
    table.last_page_len = options_.live_table->last_page_len.data();
  }
  return table;
}

void GraphState::enqueue_head(std::size_t bucket, Stream stream) {
  if (!options_.live_table || graphs_ == nullptr) return;
  std::vector<ReplanLaunch::Part> parts;
  page_counts_.assign(static_cast<std::size_t>(buckets_[bucket]), 0);
  for (const Kind& kind : kinds_) {
    const ScheduleShape& shape = kind.shapes[bucket];
    parts.push_back({.shape = &shape,
                     .plan = device_plan(shape, workspace_->props_, work_of(kind), policy_of(kind, bucket)),
                     .schedule = memory_ + kind.offset});
  }
  const auto ints = [&](std::size_t offset) { return reinterpret_cast<std::int32_t*>(memory_ + offset); };
  graphs_->replan({.parts = parts,
                   .table = fixed_table(),
                   .kv_lens = ints(table_.kv_lens),
                   .prepared = options_.plan_on_device ? nullptr : ints(table_.prepared),
                   .prepared_indptr = options_.plan_on_device ? nullptr : ints(table_.indptr),
                   .batch = buckets_[bucket],
                   .page_size = options_.page_size,
                   .num_pages = options_.num_pages,
                   .max_pages = options_.max_pages,
                   .alarm = alarm_.get(),
                   .stream = stream});
}

void GraphState::check_recording(Stream stream) const {
  if (graphs_->recording_on(stream) != recording_) {
    fail(Reason::kOptions, "stream is in another capture than the step that begin() opened: call begin() in this one");
  }
}

std::size_t GraphState::active_or_throw() const {
  if (active_ == kNoBucket) fail(Reason::kOptions, "no step was begun: call capture() or begin() first");
  return active_;
}

void GraphState::check_cache(const KvCache& kv) const {
  if (kv.num_pages < options_.num_pages) {
    fail(Reason::kPageIndex, "kv has {} pages, the session's page tables may name {}", kv.num_pages,
         options_.num_pages);
  }
}

void GraphState::run(const Operands& operands, std::size_t kind_index) {
  const Exclusive exclusive(workspace_->busy_);
  check_open();
  const std::size_t bucket = active_or_throw();
  if (kind_index >= kinds_.size()) {
    fail(Reason::kOptions, "kind is {}, the session has {} kinds of layers", kind_index, kinds_.size());
  }
  const Kind& kind = kinds_[kind_index];
  const std::int64_t rows = rows_of(bucket);
  Operands sliced = operands;
  sliced.q.rows = std::min(sliced.q.rows, rows);
  sliced.out.rows = std::min(sliced.out.rows, rows);
  sliced.stream = stream_or_step(operands.stream);
  const PageTable& table = computing_ ? host_table_ : blanks_[bucket];
  check_cache(*operands.kv);
  workspace_->check_operands(kind.traits.spec,
                             {.total_rows = rows,
                              .uniform_qo_len = window_,
                              .kv_lens = table.kv_lens(),
                              .table = &table,
                              .captured = !computing_},
                             sliced);
  if (graphs_ != nullptr) {
    check_recording(sliced.stream);
  } else if (!computing_) {
    return;
  }
  const FixedTable fixed = fixed_table();
  backend_->attend({.shape = computing_ ? &kind.shape : &kind.shapes[bucket],
                    .schedule = memory_ + kind.offset,
                    .params = &kind.traits.spec.params,
                    .q = sliced.q,
                    .uniform_qo_len = window_,
                    .kv = sliced.kv,
                    .table = &table,
                    .fixed = graphs_ == nullptr ? nullptr : &fixed,
                    .out = sliced.out,
                    .lse = sliced.lse,
                    .extras = sliced.extras,
                    .scratch = {scratch_, kind.scratch_bytes},
                    .stream = sliced.stream});
}

void GraphState::append(const ConstTensor& k, const ConstTensor& v, const KvCache& kv, Stream stream) {
  const Exclusive exclusive(workspace_->busy_);
  check_open();
  const std::size_t bucket = active_or_throw();
  const std::int64_t rows = rows_of(bucket);
  ConstTensor new_k = k;
  ConstTensor new_v = v;
  new_k.rows = std::min(new_k.rows, rows);
  new_v.rows = std::min(new_v.rows, rows);
  const PageTable& table = computing_ ? host_table_ : blanks_[bucket];
  check_cache(kv);
  const FixedTable fixed = fixed_table();
  const AppendLaunch launch{
      .k = new_k,
      .v = new_v,
      .append_indptr = std::span(qo_indptr_).first(static_cast<std::size_t>(buckets_[bucket]) + 1),
      .kv = &kv,
      .table = &table,
      .fixed = graphs_ == nullptr ? nullptr : &fixed,
      .stream = stream_or_step(stream)};
  workspace_->check_append(launch);
  if (graphs_ != nullptr) check_recording(launch.stream);
  if (graphs_ != nullptr || computing_) backend_->append(launch);
}

void GraphState::pad(const PageTable& table, std::size_t bucket) {
  page_counts_.assign(table.page_counts().begin(), table.page_counts().end());
  page_counts_.resize(static_cast<std::size_t>(buckets_[bucket]), 0);
}

void GraphState::plan_kinds(std::size_t bucket) {
  for (std::size_t i = 0; i < kinds_.size(); ++i) {
    next_[i] =
        shape_schedule(kinds_[i].traits.family, workspace_->props_, work_of(kinds_[i]), policy_of(kinds_[i], bucket));
    if (!same_layout(next_[i], kinds_[i].shapes[bucket])) {
      throw Error(Status::kInternal, Reason::kBug, "a graph's schedule has another layout than was captured");
    }
  }
}

void GraphState::write_table(const PageTable& table, std::byte* base) const {
  const auto at = [&](std::size_t offset) { return base + offset - table_.indptr; };
  // As bytes: element by element, the page ids alone take 4 us of a step of 64 requests and 10,000 pages.
  const auto put = [&](std::span<const std::int32_t> values, std::size_t offset) {
    if (!values.empty()) std::memcpy(at(offset), values.data(), values.size_bytes());
    return reinterpret_cast<std::int32_t*>(at(offset)) + values.size();
  };
  const auto padding = static_cast<std::size_t>(options_.max_batch - table.batch());
  std::fill_n(put(table.indptr(), table_.indptr), padding, table.indptr().back());
  std::fill_n(put(table.last_page_len(), table_.last_page_len), padding, 0);
  std::fill_n(put(table.kv_lens(), table_.kv_lens), padding, 0);
  put(table.indices(), table_.indices);
}

std::size_t GraphState::prepare_bucket(const PageTable& table, Stream stream) {
  const std::size_t bucket = bucket_of(table.batch());
  if (table.batch() > 0 && table.page_size() != options_.page_size) {
    fail(Reason::kPageSize, "the table's page_size is {}, the session's {}", table.page_size(), options_.page_size);
  }
  if (std::ssize(table.indices()) > options_.max_pages) {
    fail(Reason::kTableSize, "the table has {} pages, the session was made for max_pages = {}", table.indices().size(),
         options_.max_pages);
  }
  if (table.max_page_index() >= options_.num_pages) {
    fail(Reason::kPageIndex, "the table names page {}, the session was made for num_pages = {}", table.max_page_index(),
         options_.num_pages);
  }
  const bool same_plan = prepared_.bucket == bucket && prepared_.epoch == epoch() &&
                         std::ranges::equal(prepared_.table.page_counts(), table.page_counts());
  if (same_plan) ++stats_.plan_hits;
  if (same_plan && prepared_.table == table) return bucket;

  if (!same_plan) {
    pad(table, bucket);
    plan_kinds(bucket);
  }
  const std::size_t begin = same_plan ? table_.indptr : kinds_.front().offset;
  const std::size_t end = table_.indices + table.indices().size_bytes();
  const PageTable host_table = graphs_ == nullptr ? padded_table(table, bucket) : PageTable();
  const std::span<std::byte> staged = backend_->stage(memory_ + begin, end - begin);
  // Without graphs what is staged is the memory itself; with them the last plan is in force until the upload is
  // enqueued.
  const Prepared prepared{.bucket = bucket, .epoch = epoch(), .table = table};
  if (graphs_ == nullptr) prepared_.bucket = kNoBucket;
  if (!same_plan) {
    auto* const record = reinterpret_cast<std::int32_t*>(staged.data() + table_.prepared - begin);
    record[0] = buckets_[bucket];
    for (std::size_t i = 0; i < kinds_.size(); ++i) {
      write_schedule(next_[i], work_of(kinds_[i]), staged.subspan(kinds_[i].offset - begin, next_[i].bytes));
      record[1 + i] = next_[i].kv_chunk_tokens;
      record[1 + kinds_.size() + i] = 1;
    }
  }
  write_table(table, staged.data() + table_.indptr - begin);
  backend_->rewrite(memory_ + begin, staged, stream);
  if (!same_plan) {
    for (std::size_t i = 0; i < kinds_.size(); ++i) kinds_[i].shape = next_[i];
    ++stats_.plans;
  }
  host_table_ = host_table;
  prepared_ = prepared;
  return bucket;
}

PageTable GraphState::padded_table(const PageTable& table, std::size_t bucket) const {
  if (table.batch() == buckets_[bucket]) return table;
  std::vector<std::int32_t> indptr(table.indptr().begin(), table.indptr().end());
  std::vector<std::int32_t> last(table.last_page_len().begin(), table.last_page_len().end());
  indptr.resize(static_cast<std::size_t>(buckets_[bucket]) + 1, table.indptr().back());
  last.resize(static_cast<std::size_t>(buckets_[bucket]), 0);
  return PageTable::from_csr(options_.page_size, options_.num_pages, indptr, table.indices(), last);
}

std::int32_t GraphState::prepare(const PageTable& table, Stream stream) {
  const Exclusive exclusive(workspace_->busy_);
  check_outside("step() or prepare()");
  throw_if_stale();
  if (planned_by_replay()) {
    fail(Reason::kOptions, "the session plans on the device from its live table: call replay()");
  }
  if (graphs_ == nullptr) active_ = kNoBucket;      // a step that was begun would go on with the new table
  if (graphs_ != nullptr) graphs_->follow(stream);  // a plan that stands already may have come on another stream
  return buckets_[prepare_bucket(table, stream)];
}

void GraphState::step(const PageTable& table, Stream stream) { replay(prepare(table, stream), stream); }

void GraphState::replay(std::int32_t batch, Stream stream) {
  std::size_t bucket = 0;
  {
    const Exclusive exclusive(workspace_->busy_);
    check_outside("replay()");
    throw_if_stale();
    if (!body_) fail(Reason::kOptions, "nothing was captured: call capture() first");
    bucket = bucket_of(batch);
    if (!planned_by_replay()) check_prepared(bucket);
    if (graphs_ != nullptr) {
      graphs_->replay(*recordings_[bucket], stream);
      ++stats_.replays;
      return;
    }
    ++stats_.replays;
    if (options_.live_table && !read_live_table(bucket)) return;
    in_body_ = std::this_thread::get_id();
    open_step(bucket, stream);
    computing_ = true;
  }
  // The body calls run(), which takes the workspace for itself.
  const InBody in_body(*this);
  body_(buckets_[bucket]);
}

bool GraphState::read_live_table(std::size_t bucket) {
  const DevicePageTable& source = *options_.live_table;
  const LiveTable live{.indptr = source.indptr.data(),
                       .indices = source.indices.data(),
                       .last_page_len = source.last_page_len.data(),
                       .page_size = options_.page_size,
                       .max_pages = options_.max_pages,
                       .num_pages = options_.num_pages};
  const std::int32_t batch = buckets_[bucket];
  const auto stop = [&](const LiveFault& fault) {
    alarm_->reason = static_cast<std::int32_t>(fault.reason);
    alarm_->request = fault.request;
    alarm_->found = fault.found;
    alarm_->expected = fault.expected;
    ++alarm_->trips;
    return false;
  };
  for (std::int32_t r = 0; r < batch; ++r) {
    const LiveFault fault = check_extent(live, r, live.indptr[r], live.indptr[r + 1], live.last_page_len[r]);
    if (fault.reason != Reason::kNone) return stop(fault);
  }
  for (std::int32_t r = 0; r < batch; ++r) {
    for (std::int32_t entry = live.indptr[r]; entry < live.indptr[r + 1]; ++entry) {
      if (const LiveFault fault = check_page(live, r, entry); fault.reason != Reason::kNone) return stop(fault);
    }
  }
  const auto count = static_cast<std::size_t>(batch);
  const PageTable table = PageTable::from_csr(options_.page_size, options_.num_pages, source.indptr.first(count + 1),
                                              source.indices.first(static_cast<std::size_t>(source.indptr[count])),
                                              source.last_page_len.first(count));
  if (options_.plan_on_device) {
    prepare_bucket(table, nullptr);
    return true;
  }
  const std::span<const std::int32_t> prepared = host_table_.page_counts();
  for (std::int32_t r = 0; r < batch; ++r) {
    const auto i = static_cast<std::size_t>(r);
    if (table.page_counts()[i] != prepared[i]) {
      return stop({Reason::kStaleTable, r, table.page_counts()[i], prepared[i]});
    }
  }
  host_table_ = table;
  return true;
}

void GraphState::check(Stream stream) {
  const Exclusive exclusive(workspace_->busy_);
  check_outside("check()");
  backend_->fetch({}, stream);
  throw_if_stale();
}

GraphStats GraphState::stats() const noexcept {
  GraphStats stats = stats_;
  stats.bytes = memory_bytes_ + scratch_bytes_;
  return stats;
}

}  // namespace fiw::detail
