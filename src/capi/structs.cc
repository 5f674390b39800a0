// The init functions of the sized structs, and the promises of their layout.
#include <algorithm>
#include <cstring>

#include "fiw/fiw.h"

namespace {

/// Writes the defaults, at most `struct_size` bytes of them, and records that size: a caller compiled against another
/// version is never written past its end, and the call that is given the struct can say which size is not known.
template <class Struct>
void init(Struct* object, std::size_t struct_size, Struct defaults) noexcept {
  if (object == nullptr || struct_size < sizeof(defaults.struct_size)) return;
  defaults.struct_size = struct_size;
  std::memcpy(object, &defaults, std::min(struct_size, sizeof(Struct)));
}

/// A struct without tail padding: a field that is added at the end always changes its size.
#define FIW_ASSERT_ENDS_WITH(Struct, field)                                                                    \
  static_assert(                                                                                               \
      offsetof(Struct, struct_size) == 0 && offsetof(Struct, field) + sizeof(Struct::field) == sizeof(Struct), \
      #Struct " must start with struct_size and end with " #field)

FIW_ASSERT_ENDS_WITH(fiw_error, message);
FIW_ASSERT_ENDS_WITH(fiw_attention_params, logits_soft_cap);
FIW_ASSERT_ENDS_WITH(fiw_workspace_limits, reserved);
FIW_ASSERT_ENDS_WITH(fiw_plan_options, fixed_split_tokens);
FIW_ASSERT_ENDS_WITH(fiw_allocator, context);
FIW_ASSERT_ENDS_WITH(fiw_workspace_options, reserved);
FIW_ASSERT_ENDS_WITH(fiw_kv_cache, reserved);
FIW_ASSERT_ENDS_WITH(fiw_attention_extras, mask_indptr);
FIW_ASSERT_ENDS_WITH(fiw_step_spec, custom_mask);
FIW_ASSERT_ENDS_WITH(fiw_plan_info, scratch_bytes);
FIW_ASSERT_ENDS_WITH(fiw_device_props, tile_blocks_per_sm);
FIW_ASSERT_ENDS_WITH(fiw_workspace_stats, tables_copied);
FIW_ASSERT_ENDS_WITH(fiw_device_page_table, version);
FIW_ASSERT_ENDS_WITH(fiw_graph_options, plan_on_device);
FIW_ASSERT_ENDS_WITH(fiw_graph_stats, bytes);

}  // namespace

void fiw_error_init(fiw_error* error, size_t struct_size) { init<fiw_error>(error, struct_size, FIW_ERROR_INIT); }

void fiw_attention_params_init(fiw_attention_params* params, size_t struct_size) {
  init<fiw_attention_params>(params, struct_size, FIW_ATTENTION_PARAMS_INIT);
}

void fiw_workspace_limits_init(fiw_workspace_limits* limits, size_t struct_size) {
  init<fiw_workspace_limits>(limits, struct_size, FIW_WORKSPACE_LIMITS_INIT);
}

void fiw_plan_options_init(fiw_plan_options* options, size_t struct_size) {
  init<fiw_plan_options>(options, struct_size, FIW_PLAN_OPTIONS_INIT);
}

void fiw_allocator_init(fiw_allocator* allocator, size_t struct_size) {
  init<fiw_allocator>(allocator, struct_size, FIW_ALLOCATOR_INIT);
}

void fiw_workspace_options_init(fiw_workspace_options* options, size_t struct_size) {
  init<fiw_workspace_options>(options, struct_size, FIW_WORKSPACE_OPTIONS_INIT);
}

void fiw_kv_cache_init(fiw_kv_cache* cache, size_t struct_size) {
  init<fiw_kv_cache>(cache, struct_size, FIW_KV_CACHE_INIT);
}

void fiw_attention_extras_init(fiw_attention_extras* extras, size_t struct_size) {
  init<fiw_attention_extras>(extras, struct_size, FIW_ATTENTION_EXTRAS_INIT);
}

void fiw_step_spec_init(fiw_step_spec* spec, size_t struct_size) {
  init<fiw_step_spec>(spec, struct_size, FIW_STEP_SPEC_INIT);
}

void fiw_plan_info_init(fiw_plan_info* info, size_t struct_size) {
  init<fiw_plan_info>(info, struct_size, FIW_PLAN_INFO_INIT);
}

void fiw_device_props_init(fiw_device_props* props, size_t struct_size) {
  init<fiw_device_props>(props, struct_size, FIW_DEVICE_PROPS_INIT);
}

void fiw_workspace_stats_init(fiw_workspace_stats* stats, size_t struct_size) {
  init<fiw_workspace_stats>(stats, struct_size, FIW_WORKSPACE_STATS_INIT);
}

void fiw_device_page_table_init(fiw_device_page_table* table, size_t struct_size) {
  init<fiw_device_page_table>(table, struct_size, FIW_DEVICE_PAGE_TABLE_INIT);
}

void fiw_graph_options_init(fiw_graph_options* options, size_t struct_size) {
  init<fiw_graph_options>(options, struct_size, FIW_GRAPH_OPTIONS_INIT);
}

void fiw_graph_stats_init(fiw_graph_stats* stats, size_t struct_size) {
  init<fiw_graph_stats>(stats, struct_size, FIW_GRAPH_STATS_INIT);
}
