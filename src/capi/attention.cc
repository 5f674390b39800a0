// Attention calls, plans and steps in C.
#include "fiw/attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "capi/convert.h"
#include "core/support.h"

namespace {

namespace capi = fiw::capi;
using capi::paged_call;
using capi::PagedCall;
using fiw::FlashInferWorkspace;
using fiw::Reason;

fiw_step* make_handle(fiw::AttentionStep step) { return new fiw_step{std::move(step)}; }

}  // namespace

fiw_status fiw_decode(fiw_workspace* ws, const DLTensor* q, const fiw_kv_cache* kv, const fiw_page_table* table,
                      const fiw_attention_params* params, const DLTensor* out, const DLTensor* lse,
                      const fiw_attention_extras* extras, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    FlashInferWorkspace& workspace = capi::open_workspace(ws);
    const fiw::PageTable& pages = capi::page_table(table);
    const PagedCall call = paged_call(q, kv, pages.batch(), out, lse, extras);
    workspace.decode(call.q, call.kv, pages, capi::params("params", params), call.out, call.lse, call.extras, stream);
  });
}

fiw_status fiw_prefill(fiw_workspace* ws, const DLTensor* q, const DLTensor* qo_indptr, const fiw_kv_cache* kv,
                       const fiw_page_table* table, const fiw_attention_params* params, const DLTensor* out,
                       const DLTensor* lse, const fiw_attention_extras* extras, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    FlashInferWorkspace& workspace = capi::open_workspace(ws);
    const fiw::PageTable& pages = capi::page_table(table);
    const auto rows = capi::host_indices("qo_indptr", qo_indptr);
    const PagedCall call = paged_call(q, kv, pages.batch(), out, lse, extras);
    workspace.prefill(call.q, rows, call.kv, pages, capi::params("params", params), call.out, call.lse, call.extras,
                      stream);
  });
}

fiw_status fiw_verify(fiw_workspace* ws, const DLTensor* q, int32_t window, const fiw_kv_cache* kv,
                      const fiw_page_table* table, const fiw_attention_params* params, const DLTensor* out,
                      const DLTensor* lse, const fiw_attention_extras* extras, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    FlashInferWorkspace& workspace = capi::open_workspace(ws);
    const fiw::PageTable& pages = capi::page_table(table);
    const PagedCall call = paged_call(q, kv, pages.batch(), out, lse, extras);
    workspace.verify(call.q, window, call.kv, pages, capi::params("params", params), call.out, call.lse, call.extras,
                     stream);
  });
}

fiw_status fiw_ragged_prefill(fiw_workspace* ws, const DLTensor* q, const DLTensor* qo_indptr, const DLTensor* k,
                              const DLTensor* v, const DLTensor* kv_indptr, const fiw_attention_params* params,
                              const DLTensor* out, const DLTensor* lse, const fiw_attention_extras* extras,
                              void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    FlashInferWorkspace& workspace = capi::open_workspace(ws);
    const fiw::Tensor queries = capi::tensor("q", q);
    const auto rows = capi::host_indices("qo_indptr", qo_indptr);
    const fiw::Tensor keys = capi::tensor("k", k);
    const fiw::Tensor values = capi::tensor("v", v);
    const auto tokens = capi::host_indices("kv_indptr", kv_indptr);
    const fiw::Tensor result = capi::tensor("out", out);
    float* log_sums = capi::optional_lse(lse, queries, result);
    const std::size_t batch = rows.empty() ? 0 : rows.size() - 1;
    workspace.ragged_prefill(queries, rows, keys, values, tokens, capi::params("params", params), result, log_sums,
                             capi::extras(extras, queries, batch), stream);
  });
}

fiw_status fiw_append_kv(fiw_workspace* ws, const DLTensor* k, const DLTensor* v, const DLTensor* append_indptr,
                         const fiw_kv_cache* kv, const fiw_page_table* table, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    FlashInferWorkspace& workspace = capi::open_workspace(ws);
    workspace.append_kv(capi::tensor("k", k), capi::tensor("v", v), capi::host_indices("append_indptr", append_indptr),
                        capi::kv_cache(kv), capi::page_table(table), stream);
  });
}

fiw_status fiw_merge_states(fiw_workspace* ws, const DLTensor* const* part_outs, const DLTensor* const* part_lses,
                            int32_t num_parts, const DLTensor* out, const DLTensor* lse, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    FlashInferWorkspace& workspace = capi::open_workspace(ws);
    if (num_parts < 1) fiw::fail(Reason::kPartialStates, "num_parts is {}, expected at least 1", num_parts);
    capi::require(part_outs, "part_outs");
    capi::require(part_lses, "part_lses");
    std::vector<fiw::PartialState> parts(static_cast<std::size_t>(num_parts));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string out_name = fmt::format("part_outs[{}]", i);
      const fiw::Tensor part = capi::tensor(out_name.c_str(), part_outs[i]);
      parts[i] = {.out = part,
                  .lse = capi::floats(fmt::format("part_lses[{}]", i).c_str(), part_lses[i], {part.rows, part.heads},
                                      part.device, out_name.c_str())};
    }
    const fiw::Tensor merged = capi::tensor("out", out);
    float* merged_lse =
        lse == nullptr ? nullptr : capi::floats("lse", lse, {merged.rows, merged.heads}, merged.device, "out");
    workspace.merge_states(parts, merged, merged_lse, stream);
  });
}

fiw_status fiw_alibi_slopes(const DLTensor* slopes, fiw_error* err) {
  return capi::guard(err, [&] {
    const std::span<float> out = capi::host_floats("slopes", slopes);
    if (out.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
      fiw::fail(Reason::kSizeOverflow, "slopes has {} entries, more than int32 holds", out.size());
    }
    std::ranges::copy(fiw::default_alibi_slopes(static_cast<std::int32_t>(out.size())), out.begin());
  });
}

fiw_status fiw_packed_mask_bytes(const DLTensor* qo_lens, const DLTensor* kv_lens, size_t* bytes, fiw_error* err) {
  return capi::guard(err, [&] {
    const auto queries = capi::host_indices("qo_lens", qo_lens);
    const auto keys = capi::host_indices("kv_lens", kv_lens);
    if (queries.size() != keys.size()) {
      fiw::fail(Reason::kBatch, "kv_lens has {} requests, qo_lens has {}", keys.size(), queries.size());
    }
    std::int64_t total = 0;
    for (std::size_t r = 0; r < queries.size(); ++r) {
      if (queries[r] < 0) fiw::fail_at(r, Reason::kMask, "qo_lens[{}] is {}, expected at least 0", r, queries[r]);
      if (keys[r] < 0) fiw::fail_at(r, Reason::kMask, "kv_lens[{}] is {}, expected at least 0", r, keys[r]);
      total += (std::int64_t{queries[r]} * keys[r] + 7) / 8;
      if (total > std::numeric_limits<std::int32_t>::max()) {
        fiw::fail_at(r, Reason::kSizeOverflow,
                     "the packed mask of requests 0..{} takes {} bytes, more than int32 holds", r, total);
      }
    }
    capi::require(bytes, "bytes") = static_cast<std::size_t>(total);
  });
}

fiw_status fiw_pack_mask(const DLTensor* booleans, const DLTensor* qo_lens, const DLTensor* kv_lens,
                         const DLTensor* mask, const DLTensor* mask_indptr, fiw_error* err) {
  return capi::guard(err, [&] {
    const auto packed_out = capi::host_bytes("mask", mask);
    const auto indptr_out = capi::host_indices("mask_indptr", mask_indptr);
    std::vector<std::int32_t> indptr;
    const std::vector<std::uint8_t> packed =
        fiw::pack_mask(capi::host_bytes("booleans", booleans, true), capi::host_indices("qo_lens", qo_lens),
                       capi::host_indices("kv_lens", kv_lens), indptr);
    if (packed_out.size() != packed.size()) {
      fiw::fail(Reason::kTensorShape, "mask: shape [{}], expected [{}]", packed_out.size(), packed.size());
    }
    if (indptr_out.size() != indptr.size()) {
      fiw::fail(Reason::kTensorShape, "mask_indptr: shape [{}], expected [{}]", indptr_out.size(), indptr.size());
    }
    fiw::support::check_apart(
        {"mask_indptr", indptr_out.data(), sizeof(std::int32_t), static_cast<std::int64_t>(indptr_out.size())},
        {"mask", packed_out.data(), 1, static_cast<std::int64_t>(packed_out.size())});
    std::ranges::copy(packed, packed_out.begin());
    std::ranges::copy(indptr, indptr_out.begin());
  });
}

fiw_status fiw_plan_decode(fiw_workspace* ws, const fiw_page_table* table, const fiw_step_spec* spec, fiw_step** out,
                           fiw_error* err) {
  return capi::hand_out(ws, out, err, [&](FlashInferWorkspace& workspace) {
    return make_handle(workspace.plan_decode(capi::page_table(table), capi::step_spec("spec", spec)));
  });
}

fiw_status fiw_plan_prefill(fiw_workspace* ws, const DLTensor* qo_indptr, const fiw_page_table* table,
                            const fiw_step_spec* spec, fiw_step** out, fiw_error* err) {
  return capi::hand_out(ws, out, err, [&](FlashInferWorkspace& workspace) {
    const auto rows = capi::host_indices("qo_indptr", qo_indptr);
    return make_handle(workspace.plan_prefill(rows, capi::page_table(table), capi::step_spec("spec", spec)));
  });
}

fiw_status fiw_plan_verify(fiw_workspace* ws, int32_t window, const fiw_page_table* table, const fiw_step_spec* spec,
                           fiw_step** out, fiw_error* err) {
  return capi::hand_out(ws, out, err, [&](FlashInferWorkspace& workspace) {
    return make_handle(workspace.plan_verify(window, capi::page_table(table), capi::step_spec("spec", spec)));
  });
}

fiw_status fiw_step_run(const fiw_step* step, const DLTensor* q, const fiw_kv_cache* kv, const DLTensor* out,
                        const DLTensor* lse, const fiw_attention_extras* extras, void* stream, fiw_error* err) {
  return capi::guard(err, [&] {
    const fiw::AttentionStep& planned = capi::require(step, "step").step;
    planned.check_ready();
    const PagedCall call = paged_call(q, kv, planned.page_table().batch(), out, lse, extras);
    planned.run(call.q, call.kv, call.out, call.lse, call.extras, stream);
  });
}

fiw_status fiw_step_info(const fiw_step* step, fiw_plan_info* info, fiw_error* err) {
  return capi::guard(err, [&] {
    const fiw::AttentionStep& planned = capi::require(step, "step").step;
    fiw_plan_info& out = capi::require_struct(info, "info");
    const fiw::PlanInfo plan = planned.info();
    out.batch = plan.batch;
    out.items = plan.items;
    out.padded_items = plan.padded_items;
    out.kv_chunk_tokens = plan.kv_chunk_tokens;
    out.tile_rows = plan.tile_rows;
    out.split_kv = plan.split_kv ? 1 : 0;
    out.cache_hit = plan.cache_hit ? 1 : 0;
    out.reserved = 0;
    out.schedule_bytes = plan.schedule_bytes;
    out.scratch_bytes = plan.scratch_bytes;
  });
}

void fiw_step_free(fiw_step* step) { delete step; }
