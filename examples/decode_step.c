// The step of decode_step.cc through the C ABI: two requests, four layers, one plan.
#include <fiw/fiw.h>
#include <stdio.h>
#include <stdlib.h>

enum { HEADS = 8, KV_HEADS = 2, DIM = 64, PAGE_SIZE = 16, PAGES = 32, LAYERS = 4 };

static DLTensor tensor(void* data, DLDataType dtype, int32_t rank, int64_t* shape) {
  DLTensor t = {0};
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = rank;
  t.dtype = dtype;
  t.shape = shape;
  return t;
}

static fiw_status decode_step(float* out, fiw_workspace_stats* stats, fiw_error* err) {
  const DLDataType f32 = {kDLFloat, 32, 1}, i32 = {kDLInt, 32, 1};
  static float q[2 * HEADS * DIM], k[PAGES * PAGE_SIZE * KV_HEADS * DIM], v[PAGES * PAGE_SIZE * KV_HEADS * DIM];
  for (int i = 0; i < 2 * HEADS * DIM; ++i) q[i] = 1.0f;
  for (int i = 0; i < PAGES * PAGE_SIZE * KV_HEADS * DIM; ++i) v[i] = (float)(i / (PAGE_SIZE * KV_HEADS * DIM));

  // Request 0 has 20 tokens, in pages 7 and 3; request 1 has 5, in page 9.
  int32_t page_ids[] = {7, 3, 9}, page_counts[] = {2, 1}, kv_lens[] = {20, 5};
  int64_t three[] = {3}, two[] = {2};
  const DLTensor ids = tensor(page_ids, i32, 1, three);
  const DLTensor counts = tensor(page_counts, i32, 1, two);
  const DLTensor lens = tensor(kv_lens, i32, 1, two);

  int64_t row_shape[] = {2, HEADS, DIM}, pool_shape[] = {PAGES, PAGE_SIZE, KV_HEADS, DIM};
  const DLTensor q_tensor = tensor(q, f32, 3, row_shape);
  const DLTensor out_tensor = tensor(out, f32, 3, row_shape);
  const DLTensor k_tensor = tensor(k, f32, 4, pool_shape);
  const DLTensor v_tensor = tensor(v, f32, 4, pool_shape);
  fiw_kv_cache kv = FIW_KV_CACHE_INIT;
  kv.k = &k_tensor;
  kv.v = &v_tensor;
  fiw_attention_params params = FIW_ATTENTION_PARAMS_INIT;
  params.num_qo_heads = HEADS;
  params.num_kv_heads = KV_HEADS;
  params.head_dim_qk = DIM;

  fiw_workspace* workspace = NULL;
  fiw_page_table* table = NULL;
  fiw_status status = fiw_workspace_create(-1, 0, &workspace, err);
  if (status == FIW_OK) status = fiw_page_table_from_pages(PAGE_SIZE, PAGES, &ids, &counts, &lens, &table, err);
  for (int layer = 0; status == FIW_OK && layer < LAYERS; ++layer) {
    status = fiw_decode(workspace, &q_tensor, &kv, table, &params, &out_tensor, NULL, NULL, NULL, err);
  }
  if (status == FIW_OK) status = fiw_workspace_get_stats(workspace, stats, err);
  fiw_page_table_free(table);
  fiw_workspace_free(workspace);
  return status;
}

int main(void) {
  static float out[2 * HEADS * DIM];
  fiw_workspace_stats stats = FIW_WORKSPACE_STATS_INIT;
  fiw_error err = FIW_ERROR_INIT;
  if (fiw_check_abi(FIW_ABI_VERSION, &err) != FIW_OK || decode_step(out, &stats, &err) != FIW_OK) {
    fprintf(stderr, "%s: %s\n", fiw_status_name(err.code), err.message);
    return EXIT_FAILURE;
  }
  printf("out %.2f and %.2f; plans made %d, found %d\n", out[0], out[HEADS * DIM], (int)stats.decode.misses,
         (int)stats.decode.hits);
  return EXIT_SUCCESS;
}
