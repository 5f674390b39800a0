/* Every function of fiw.h, called from C, with results recomputed here by plain double loops and every class of error.
 */
#include <fiw/fiw.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"

int checks_passed = 0;
int checks_failed = 0;

#define MAX_BATCH 8
#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))

/* ---- random numbers, element formats, tensors
 * ------------------------------------------------------------------------ */

static uint64_t random_state = 1;

static uint32_t random_bits(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (uint32_t)(random_state >> 32);
}

static int random_below(int n) { return (int)(random_bits() % (uint32_t)n); }

/* An IEEE-like format: sign, exponent, mantissa. */
typedef struct format {
  DLDataType dtype;
  int exponent_bits;
  int mantissa_bits;
} format;

static const format kF32 = {{kDLFloat, 32, 1}, 8, 23};
static const format kF16 = {{kDLFloat, 16, 1}, 5, 10};
static const format kBf16 = {{kDLBfloat, 16, 1}, 8, 7};
static const format kE4m3 = {{FIW_DL_FLOAT8_E4M3FN, 8, 1}, 4, 3};
static const format kE5m2 = {{FIW_DL_FLOAT8_E5M2, 8, 1}, 5, 2};

static size_t size_of(const format* f) { return f->dtype.bits / 8; }

static uint32_t load_bits(const format* f, const void* memory, size_t index) {
  const unsigned char* at = (const unsigned char*)memory + index * size_of(f);
  uint32_t bits = 0;
  memcpy(&bits, at, size_of(f)); /* little endian */
  return bits;
}

static double value_of(const format* f, const void* memory, size_t index) {
  const uint32_t bits = load_bits(f, memory, index);
  const uint32_t mantissa = bits & ((1u << f->mantissa_bits) - 1);
  const int exponent = (int)((bits >> f->mantissa_bits) & ((1u << f->exponent_bits) - 1));
  const int bias = (1 << (f->exponent_bits - 1)) - 1;
  const double sign = (bits >> (f->exponent_bits + f->mantissa_bits)) & 1 ? -1.0 : 1.0;
  const int top = exponent == (1 << f->exponent_bits) - 1;
  if (f->dtype.code == FIW_DL_FLOAT8_E4M3FN) {
    if (top && mantissa == 7) return NAN;
  } else if (top) {
    return mantissa == 0 ? sign * INFINITY : NAN;
  }
  if (exponent == 0) return sign * ldexp((double)mantissa, 1 - bias - f->mantissa_bits);
  return sign * ldexp(1.0 + ldexp((double)mantissa, -f->mantissa_bits), exponent - bias);
}

/* Writes a random value of magnitude 1/16 .. 2, exact in the format. */
static void fill_random(const format* f, void* memory, size_t index) {
  const uint32_t bias = (1u << (f->exponent_bits - 1)) - 1;
  const uint32_t exponent = bias - (uint32_t)random_below(5);
  const uint32_t mantissa = random_bits() & ((1u << f->mantissa_bits) - 1);
  const uint32_t sign = random_bits() & 1;
  const uint32_t bits = (((sign << f->exponent_bits) | exponent) << f->mantissa_bits) | mantissa;
  memcpy((unsigned char*)memory + index * size_of(f), &bits, size_of(f));
}

/* All bits set is a NaN in every format. */
static void* poisoned(size_t bytes) {
  void* memory = malloc(bytes + 1);
  if (memory == NULL) abort();
  memset(memory, 0xFF, bytes);
  return memory;
}

/* A DLTensor with room for its shape and strides. Not to be copied: it points into itself. */
typedef struct tensor {
  DLTensor dl;
  int64_t shape[5];
  int64_t strides[5];
} tensor;

static const DLTensor* make(tensor* t, void* data, DLDataType dtype, int rank, const int64_t* shape) {
  memset(t, 0, sizeof *t);
  t->dl.data = data;
  t->dl.device.device_type = kDLCPU;
  t->dl.ndim = rank;
  t->dl.dtype = dtype;
  t->dl.shape = t->shape;
  memcpy(t->shape, shape, (size_t)rank * sizeof *shape);
  return &t->dl;
}

static const DLTensor* make1(tensor* t, void* data, DLDataType dtype, int64_t a) { return make(t, data, dtype, 1, &a); }

static const DLTensor* make2(tensor* t, void* data, DLDataType dtype, int64_t a, int64_t b) {
  const int64_t shape[2] = {a, b};
  return make(t, data, dtype, 2, shape);
}

static const DLTensor* make3(tensor* t, void* data, DLDataType dtype, int64_t a, int64_t b, int64_t c) {
  const int64_t shape[3] = {a, b, c};
  return make(t, data, dtype, 3, shape);
}

static const DLDataType kI32 = {kDLInt, 32, 1};
static const DLDataType kI64 = {kDLInt, 64, 1};
static const DLDataType kU8 = {kDLUInt, 8, 1};
static const DLDataType kFloat = {kDLFloat, 32, 1};

static const DLTensor* ints(tensor* t, const int32_t* data, int64_t n) {
  union {
    const int32_t* from;
    void* to;
  } pointer;
  pointer.from = data;
  return make1(t, pointer.to, kI32, n);
}

static fiw_error new_error(void) {
  fiw_error err = FIW_ERROR_INIT;
  return err;
}

static fiw_attention_params new_params(int num_qo_heads, int num_kv_heads, int head_dim) {
  fiw_attention_params params = FIW_ATTENTION_PARAMS_INIT;
  params.num_qo_heads = num_qo_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim_qk = head_dim;
  return params;
}

static void check_near(const char* what, double got, double want, double tolerance) {
  if (isinf(want) ? got == want : fabs(got - want) <= tolerance) {
    ++checks_passed;
  } else {
    ++checks_failed;
    printf("%s: got %.9g, expected %.9g\n", what, got, want);
  }
}

/* ---- the reference: one row and head over dense double K and V
 * ------------------------------------------------------- */

typedef struct row_options {
  int has_sink;
  double sink;
  double slope;
  const unsigned char* mask; /* one byte a key, or null */
} row_options;

static double reference_row(const fiw_attention_params* params, const double* q, const double* k, const double* v,
                            int head, int kv_len, int64_t q_pos, const row_options* options, double* out) {
  const int dqk = params->head_dim_qk;
  const int dvo = params->head_dim_vo == 0 ? dqk : params->head_dim_vo;
  const int kv_head = head / (params->num_qo_heads / params->num_kv_heads);
  const double scale = params->sm_scale > 0 ? params->sm_scale : 1.0 / sqrt(dqk);
  double* s = malloc((size_t)(kv_len + 1) * sizeof *s);
  if (s == NULL) abort();
  double top = -INFINITY;
  for (int j = 0; j < kv_len; ++j) {
    double dot = 0;
    for (int d = 0; d < dqk; ++d) dot += q[d] * k[(j * params->num_kv_heads + kv_head) * dqk + d];
    s[j] = scale * dot + options->slope * (double)(j - q_pos);
    if (params->logits_soft_cap > 0) s[j] = params->logits_soft_cap * tanh(s[j] / params->logits_soft_cap);
    int visible = options->mask != NULL ? options->mask[j] != 0 : !params->causal || j <= q_pos;
    if (params->window_left >= 0 && j < q_pos - params->window_left) visible = 0;
    if (!visible) s[j] = -INFINITY;
    if (s[j] > top) top = s[j];
  }
  for (int d = 0; d < dvo; ++d) out[d] = 0;
  if (top == -INFINITY) {
    free(s);
    return -INFINITY;
  }
  if (options->has_sink && options->sink > top) top = options->sink;
  double sum = options->has_sink ? exp(options->sink - top) : 0;
  for (int j = 0; j < kv_len; ++j) {
    const double weight = exp(s[j] - top);
    sum += weight;
    for (int d = 0; d < dvo; ++d) out[d] += weight * v[(j * params->num_kv_heads + kv_head) * dvo + d];
  }
  for (int d = 0; d < dvo; ++d) out[d] /= sum;
  free(s);
  return top + log(sum);
}

/* ---- a paged problem: cache, table, queries, and what must come out
 * -------------------------------------------------- */

typedef enum call_kind { DECODE, PREFILL, VERIFY } call_kind;

typedef struct scenario {
  const char* name;
  call_kind kind;
  int num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo; /* head_dim_vo 0: as head_dim_qk */
  int page_size;
  int batch;
  int kv_len[MAX_BATCH];
  int qo_len[MAX_BATCH]; /* decode: 1; verify: one window */
  const format* q_format;
  const format* kv_format;
  int hnd, interleaved, strided;
  int causal, window_left;
  float sm_scale, soft_cap;
  float k_scale, v_scale;
  int head_scales, sinks, alibi, mask;
} scenario;

typedef struct problem {
  const scenario* s;
  fiw_attention_params params;
  int dvo, total_q, total_kv, num_pages;
  int32_t qo_indptr[MAX_BATCH + 1];
  fiw_page_table* table;
  unsigned char* k_memory; /* also K and V of an interleaved cache */
  unsigned char* v_memory;
  unsigned char* q_memory;
  unsigned char* out_memory;
  float* lse_memory;
  float *k_head_scale, *v_head_scale, *sinks, *slopes;
  unsigned char *booleans, *mask_memory;
  int32_t mask_indptr[MAX_BATCH + 1];
  tensor q, k, v, kv, out, lse, k_head_scale_t, v_head_scale_t, sinks_t, slopes_t, mask_t, mask_indptr_t, qo_indptr_t;
  fiw_kv_cache cache;
  fiw_attention_extras extras;
  int64_t q_row, out_row;    /* strides in elements */
  size_t q_first;            /* elements in front of q, for byte_offset */
  int64_t k_page, v_page;    /* strides in elements */
  double *dense_k, *dense_v; /* dequantised, request after request */
} problem;

static float random_unit(void) {
  float value = 0;
  fill_random(&kF32, &value, 0);
  return value;
}

static float* random_floats(int n) {
  float* values = malloc((size_t)n * sizeof *values);
  if (values == NULL) abort();
  for (int i = 0; i < n; ++i) values[i] = random_unit();
  return values;
}

static size_t slot_offset(const problem* p, int64_t page_stride, int page, int token, int head, int dim) {
  const scenario* s = p->s;
  const int64_t in_page =
      s->hnd ? ((int64_t)head * s->page_size + token) * dim : ((int64_t)token * s->num_kv_heads + head) * dim;
  return (size_t)(page * page_stride + in_page);
}

static void build_cache(problem* p) {
  const scenario* s = p->s;
  const int dqk = s->head_dim_qk;
  const int64_t k_block = (int64_t)s->page_size * s->num_kv_heads * dqk;
  const int64_t v_block = (int64_t)s->page_size * s->num_kv_heads * p->dvo;
  const int64_t gap = s->strided ? 8 : 0;
  const int64_t axis1 = s->hnd ? s->num_kv_heads : s->page_size;
  const int64_t axis2 = s->hnd ? s->page_size : s->num_kv_heads;
  fiw_kv_cache_init(&p->cache, sizeof p->cache);
  p->cache.layout = s->hnd ? FIW_LAYOUT_HND : FIW_LAYOUT_NHD;
  p->cache.k_scale = s->k_scale;
  p->cache.v_scale = s->v_scale;
  p->k_page = s->interleaved ? 2 * k_block + gap : k_block + gap;
  p->v_page = s->interleaved ? p->k_page : v_block + gap;
  p->k_memory = poisoned((size_t)(p->num_pages * p->k_page) * size_of(s->kv_format));
  p->v_memory = s->interleaved ? p->k_memory + (size_t)k_block * size_of(s->kv_format)
                               : poisoned((size_t)(p->num_pages * p->v_page) * size_of(s->kv_format));
  if (s->interleaved) {
    const int64_t shape[5] = {p->num_pages, 2, axis1, axis2, dqk};
    const int64_t strides[5] = {p->k_page, k_block, axis2 * dqk, dqk, 1};
    p->cache.kv = make(&p->kv, p->k_memory, s->kv_format->dtype, 5, shape);
    memcpy(p->kv.strides, strides, sizeof strides);
    if (s->strided) p->kv.dl.strides = p->kv.strides;
  } else {
    const int64_t k_shape[4] = {p->num_pages, axis1, axis2, dqk};
    const int64_t v_shape[4] = {p->num_pages, axis1, axis2, p->dvo};
    const int64_t k_strides[4] = {p->k_page, axis2 * dqk, dqk, 1};
    const int64_t v_strides[4] = {p->v_page, axis2 * p->dvo, p->dvo, 1};
    p->cache.k = make(&p->k, p->k_memory, s->kv_format->dtype, 4, k_shape);
    p->cache.v = make(&p->v, p->v_memory, s->kv_format->dtype, 4, v_shape);
    memcpy(p->k.strides, k_strides, sizeof k_strides);
    memcpy(p->v.strides, v_strides, sizeof v_strides);
    if (s->strided) p->k.dl.strides = p->k.strides, p->v.dl.strides = p->v.strides;
  }
  if (s->head_scales) {
    p->k_head_scale = random_floats(s->num_kv_heads);
    p->v_head_scale = random_floats(s->num_kv_heads);
    for (int h = 0; h < s->num_kv_heads; ++h) {
      p->k_head_scale[h] = fabsf(p->k_head_scale[h]);
      p->v_head_scale[h] = fabsf(p->v_head_scale[h]);
    }
    p->cache.k_head_scale = make1(&p->k_head_scale_t, p->k_head_scale, kFloat, s->num_kv_heads);
    p->cache.v_head_scale = make1(&p->v_head_scale_t, p->v_head_scale, kFloat, s->num_kv_heads);
  }
}

/* Fills the used slots at random, and the dense copies with what they mean. */
static void fill_cache(problem* p) {
  const scenario* s = p->s;
  const int32_t* indptr = fiw_page_table_indptr(p->table);
  const int32_t* indices = fiw_page_table_indices(p->table);
  p->dense_k = malloc((size_t)(p->total_kv * s->num_kv_heads * s->head_dim_qk + 1) * sizeof(double));
  p->dense_v = malloc((size_t)(p->total_kv * s->num_kv_heads * p->dvo + 1) * sizeof(double));
  if (p->dense_k == NULL || p->dense_v == NULL) abort();
  double* k = p->dense_k;
  double* v = p->dense_v;
  for (int r = 0; r < s->batch; ++r) {
    for (int j = 0; j < s->kv_len[r]; ++j) {
      const int page = indices[indptr[r] + j / s->page_size];
      for (int h = 0; h < s->num_kv_heads; ++h) {
        const double k_scale = p->cache.k_scale * (double)(p->k_head_scale ? p->k_head_scale[h] : 1.0f);
        const double v_scale = p->cache.v_scale * (double)(p->v_head_scale ? p->v_head_scale[h] : 1.0f);
        for (int d = 0; d < s->head_dim_qk; ++d) {
          const size_t at = slot_offset(p, p->k_page, page, j % s->page_size, h, s->head_dim_qk) + (size_t)d;
          fill_random(s->kv_format, p->k_memory, at);
          *k++ = value_of(s->kv_format, p->k_memory, at) * k_scale;
        }
        for (int d = 0; d < p->dvo; ++d) {
          const size_t at = slot_offset(p, p->v_page, page, j % s->page_size, h, p->dvo) + (size_t)d;
          fill_random(s->kv_format, p->v_memory, at);
          *v++ = value_of(s->kv_format, p->v_memory, at) * v_scale;
        }
      }
    }
  }
}

/* Scattered pages from a pool with some to spare. */
static void build_table(problem* p) {
  const scenario* s = p->s;
  int32_t indptr[MAX_BATCH + 1] = {0};
  int32_t last[MAX_BATCH] = {0};
  for (int r = 0; r < s->batch; ++r) {
    const int pages = (s->kv_len[r] + s->page_size - 1) / s->page_size;
    indptr[r + 1] = indptr[r] + pages;
    last[r] = pages == 0 ? 0 : s->kv_len[r] - (pages - 1) * s->page_size;
    p->total_kv += s->kv_len[r];
    p->qo_indptr[r + 1] = p->qo_indptr[r] + s->qo_len[r];
  }
  p->total_q = p->qo_indptr[s->batch];
  p->num_pages = indptr[s->batch] + 3;
  int32_t* pages = malloc((size_t)p->num_pages * sizeof *pages);
  if (pages == NULL) abort();
  for (int i = 0; i < p->num_pages; ++i) pages[i] = i;
  for (int i = p->num_pages - 1; i > 0; --i) {
    const int other = random_below(i + 1);
    const int32_t page = pages[i];
    pages[i] = pages[other];
    pages[other] = page;
  }
  tensor a, b, c, d;
  int32_t kv_lens[MAX_BATCH] = {0};
  for (int r = 0; r < s->batch; ++r) kv_lens[r] = s->kv_len[r];
  fiw_error err = new_error();
  CHECK_OK(fiw_page_table_from_csr(s->page_size, p->num_pages, ints(&a, indptr, s->batch + 1),
                                   ints(&b, pages, indptr[s->batch]), ints(&c, last, s->batch),
                                   ints(&d, kv_lens, s->batch), &p->table, &err),
           err);
  free(pages);
}

static void build_mask(problem* p) {
  const scenario* s = p->s;
  int32_t kv_lens[MAX_BATCH], qo_lens[MAX_BATCH];
  int64_t bits = 0;
  for (int r = 0; r < s->batch; ++r) {
    kv_lens[r] = s->kv_len[r];
    qo_lens[r] = s->qo_len[r];
    bits += (int64_t)s->kv_len[r] * s->qo_len[r];
  }
  p->booleans = poisoned((size_t)bits);
  for (int64_t i = 0; i < bits; ++i) p->booleans[i] = random_below(3) != 0;
  tensor booleans, qo, kv;
  size_t bytes = 0;
  fiw_error err = new_error();
  CHECK_OK(fiw_packed_mask_bytes(ints(&qo, qo_lens, s->batch), ints(&kv, kv_lens, s->batch), &bytes, &err), err);
  p->mask_memory = poisoned(bytes);
  p->extras.mask = make1(&p->mask_t, p->mask_memory, kU8, (int64_t)bytes);
  p->extras.mask_indptr = ints(&p->mask_indptr_t, p->mask_indptr, s->batch + 1);
  const DLDataType bool_type = {FIW_DL_BOOL, 8, 1};
  CHECK_OK(fiw_pack_mask(make1(&booleans, p->booleans, bool_type, bits), &qo.dl, &kv.dl, &p->mask_t.dl,
                         &p->mask_indptr_t.dl, &err),
           err);
  CHECK(p->mask_indptr[s->batch] == (int32_t)bytes);
}

static void build(problem* p, const scenario* s) {
  memset(p, 0, sizeof *p);
  p->s = s;
  p->dvo = s->head_dim_vo == 0 ? s->head_dim_qk : s->head_dim_vo;
  p->params = new_params(s->num_qo_heads, s->num_kv_heads, s->head_dim_qk);
  p->params.head_dim_vo = s->head_dim_vo;
  p->params.sm_scale = s->sm_scale;
  p->params.causal = s->causal;
  p->params.window_left = s->window_left;
  p->params.logits_soft_cap = s->soft_cap;
  fiw_attention_extras_init(&p->extras, sizeof p->extras);
  build_table(p);
  build_cache(p);
  fill_cache(p);
  p->q_first = s->strided ? 32 : 0;
  p->q_row = (int64_t)s->num_qo_heads * s->head_dim_qk + (s->strided ? 16 : 0);
  p->out_row = (int64_t)s->num_qo_heads * p->dvo + (s->strided ? 24 : 0);
  p->q_memory = poisoned((p->q_first + (size_t)(p->total_q * p->q_row)) * size_of(s->q_format));
  p->out_memory = poisoned((size_t)(p->total_q * p->out_row) * size_of(s->q_format));
  p->lse_memory = poisoned((size_t)(p->total_q * s->num_qo_heads) * sizeof(float));
  for (int64_t row = 0; row < p->total_q; ++row) {
    for (int64_t i = 0; i < (int64_t)s->num_qo_heads * s->head_dim_qk; ++i) {
      fill_random(s->q_format, p->q_memory, p->q_first + (size_t)(row * p->q_row + i));
    }
  }
  make3(&p->q, p->q_memory, s->q_format->dtype, p->total_q, s->num_qo_heads, s->head_dim_qk);
  make3(&p->out, p->out_memory, s->q_format->dtype, p->total_q, s->num_qo_heads, p->dvo);
  make2(&p->lse, p->lse_memory, kFloat, p->total_q, s->num_qo_heads);
  ints(&p->qo_indptr_t, p->qo_indptr, s->batch + 1);
  p->q.dl.byte_offset = p->q_first * size_of(s->q_format);
  if (s->strided) {
    const int64_t q_strides[3] = {p->q_row, s->head_dim_qk, 1};
    const int64_t out_strides[3] = {p->out_row, p->dvo, 1};
    memcpy(p->q.strides, q_strides, sizeof q_strides);
    memcpy(p->out.strides, out_strides, sizeof out_strides);
    p->q.dl.strides = p->q.strides;
    p->out.dl.strides = p->out.strides;
  }
  if (s->sinks)
    p->extras.sinks = make1(&p->sinks_t, p->sinks = random_floats(s->num_qo_heads), kFloat, s->num_qo_heads);
  if (s->alibi) {
    p->slopes = poisoned((size_t)s->num_qo_heads * sizeof(float));
    p->extras.alibi_slopes = make1(&p->slopes_t, p->slopes, kFloat, s->num_qo_heads);
    fiw_error err = new_error();
    CHECK_OK(fiw_alibi_slopes(&p->slopes_t.dl, &err), err);
  }
  if (s->mask) build_mask(p);
}

static void destroy(problem* p) {
  fiw_page_table_free(p->table);
  if (!p->s->interleaved) free(p->v_memory);
  free(p->k_memory);
  free(p->q_memory);
  free(p->out_memory);
  free(p->lse_memory);
  free(p->k_head_scale);
  free(p->v_head_scale);
  free(p->sinks);
  free(p->slopes);
  free(p->booleans);
  free(p->mask_memory);
  free(p->dense_k);
  free(p->dense_v);
}

static void poison_results(problem* p) {
  memset(p->out_memory, 0xFF, (size_t)(p->total_q * p->out_row) * size_of(p->s->q_format));
  memset(p->lse_memory, 0xFF, (size_t)(p->total_q * p->s->num_qo_heads) * sizeof(float));
}

static void check_results(const problem* p, const char* door, int with_lse) {
  const scenario* s = p->s;
  double* q = malloc((size_t)s->head_dim_qk * sizeof *q);
  double* want = malloc((size_t)p->dvo * sizeof *want);
  if (q == NULL || want == NULL) abort();
  const double* k = p->dense_k;
  const double* v = p->dense_v;
  const unsigned char* mask = p->booleans;
  int bad = 0;
  double worst = 0;
  for (int r = 0; r < s->batch; ++r) {
    for (int i = 0; i < s->qo_len[r]; ++i) {
      const int64_t row = p->qo_indptr[r] + i;
      for (int h = 0; h < s->num_qo_heads; ++h) {
        for (int d = 0; d < s->head_dim_qk; ++d) {
          q[d] = value_of(s->q_format, p->q_memory, p->q_first + (size_t)(row * p->q_row + h * s->head_dim_qk + d));
        }
        row_options options = {0, 0, 0, NULL};
        if (p->sinks != NULL) options.has_sink = 1, options.sink = p->sinks[h];
        if (p->slopes != NULL) options.slope = p->slopes[h];
        if (mask != NULL) options.mask = mask + (size_t)i * (size_t)s->kv_len[r];
        const double lse =
            reference_row(&p->params, q, k, v, h, s->kv_len[r], s->kv_len[r] - s->qo_len[r] + i, &options, want);
        for (int d = 0; d < p->dvo; ++d) {
          const double got = value_of(s->q_format, p->out_memory, (size_t)(row * p->out_row + h * p->dvo + d));
          const double difference = fabs(got - want[d]);
          if (difference > worst) worst = difference;
          if (!(difference <= 1e-4 + fabs(want[d]) * ldexp(1.0, -s->q_format->mantissa_bits))) ++bad;
        }
        const double got_lse = p->lse_memory[row * s->num_qo_heads + h];
        if (with_lse && !(isinf(lse) ? got_lse == lse : fabs(got_lse - lse) <= 1e-3)) ++bad;
      }
    }
    k += (size_t)(s->kv_len[r] * s->num_kv_heads * s->head_dim_qk);
    v += (size_t)(s->kv_len[r] * s->num_kv_heads * p->dvo);
    if (mask != NULL) mask += (size_t)s->qo_len[r] * (size_t)s->kv_len[r];
  }
  if (bad > 0) printf("%s by %s: %d values are wrong, the largest error is %g\n", s->name, door, bad, worst);
  CHECK(bad == 0);
  free(q);
  free(want);
}

static fiw_status call_once(fiw_workspace* ws, problem* p, const DLTensor* lse, fiw_error* err) {
  const DLTensor* q = &p->q.dl;
  const DLTensor* out = &p->out.dl;
  switch (p->s->kind) {
    case DECODE:
      return fiw_decode(ws, q, &p->cache, p->table, &p->params, out, lse, &p->extras, NULL, err);
    case PREFILL:
      return fiw_prefill(ws, q, &p->qo_indptr_t.dl, &p->cache, p->table, &p->params, out, lse, &p->extras, NULL, err);
    case VERIFY:
      return fiw_verify(ws, q, p->s->qo_len[0], &p->cache, p->table, &p->params, out, lse, &p->extras, NULL, err);
  }
  return FIW_INTERNAL;
}

static fiw_step_spec spec_of(const problem* p) {
  fiw_step_spec spec = FIW_STEP_SPEC_INIT;
  spec.params = &p->params;
  spec.q_dtype = p->s->q_format->dtype;
  spec.kv_dtype = p->s->kv_format->dtype;
  spec.lse = 1;
  spec.sinks = p->s->sinks;
  spec.alibi = p->s->alibi;
  spec.custom_mask = p->s->mask;
  return spec;
}

static fiw_status plan(fiw_workspace* ws, const problem* p, const fiw_step_spec* spec, fiw_step** step,
                       fiw_error* err) {
  switch (p->s->kind) {
    case DECODE:
      return fiw_plan_decode(ws, p->table, spec, step, err);
    case PREFILL:
      return fiw_plan_prefill(ws, &p->qo_indptr_t.dl, p->table, spec, step, err);
    case VERIFY:
      return fiw_plan_verify(ws, p->s->qo_len[0], p->table, spec, step, err);
  }
  return FIW_INTERNAL;
}

/* Each scenario goes through both doors, with and without the LSE. */
static void run_scenario(fiw_workspace* ws, const scenario* s) {
  static problem p;
  fiw_error err = new_error();
  build(&p, s);
  CHECK_OK(call_once(ws, &p, &p.lse.dl, &err), err);
  check_results(&p, "a call", 1);
  poison_results(&p);
  CHECK_OK(call_once(ws, &p, NULL, &err), err);
  check_results(&p, "a call without LSE", 0);

  fiw_step* step = NULL;
  const fiw_step_spec spec = spec_of(&p);
  CHECK_OK(plan(ws, &p, &spec, &step, &err), err);
  fiw_plan_info info = FIW_PLAN_INFO_INIT;
  CHECK_OK(fiw_step_info(step, &info, &err), err);
  CHECK(info.batch == s->batch && info.items >= 0 && info.padded_items >= info.items &&
        info.struct_size == sizeof info);
  poison_results(&p);
  CHECK_OK(fiw_step_run(step, &p.q.dl, &p.cache, &p.out.dl, &p.lse.dl, &p.extras, NULL, &err), err);
  check_results(&p, "a step", 1);
  fiw_step_free(step);
  CHECK_OK(plan(ws, &p, &spec, &step, &err), err);
  CHECK_OK(fiw_step_info(step, &info, &err), err);
  CHECK(info.cache_hit == 1);
  fiw_step_free(step);
  destroy(&p);
}

#define PLAIN .sm_scale = 0, .causal = 1, .window_left = -1, .k_scale = 1, .v_scale = 1

static const scenario kScenarios[] = {
    {.name = "decode",
     .kind = DECODE,
     .num_qo_heads = 8,
     .num_kv_heads = 2,
     .head_dim_qk = 64,
     .page_size = 16,
     .batch = 4,
     .kv_len = {33, 1, 0, 257},
     .qo_len = {1, 1, 1, 1},
     .q_format = &kF32,
     .kv_format = &kF32,
     PLAIN},
    {.name = "decode of no request",
     .kind = DECODE,
     .num_qo_heads = 8,
     .num_kv_heads = 2,
     .head_dim_qk = 64,
     .page_size = 16,
     .batch = 0,
     .q_format = &kF32,
     .kv_format = &kF32,
     PLAIN},
    {.name = "decode HND, bf16, strided, sinks",
     .kind = DECODE,
     .num_qo_heads = 6,
     .num_kv_heads = 2,
     .head_dim_qk = 80,
     .page_size = 5,
     .batch = 3,
     .kv_len = {12, 100, 5},
     .qo_len = {1, 1, 1},
     .q_format = &kBf16,
     .kv_format = &kBf16,
     .hnd = 1,
     .strided = 1,
     .sinks = 1,
     PLAIN},
    {.name = "decode e4m3 with scales",
     .kind = DECODE,
     .num_qo_heads = 4,
     .num_kv_heads = 4,
     .head_dim_qk = 128,
     .page_size = 16,
     .batch = 2,
     .kv_len = {40, 17},
     .qo_len = {1, 1},
     .q_format = &kF16,
     .kv_format = &kE4m3,
     .causal = 1,
     .window_left = -1,
     .k_scale = 0.25f,
     .v_scale = 0.5f,
     .head_scales = 1},
    {.name = "decode interleaved e5m2, window",
     .kind = DECODE,
     .num_qo_heads = 8,
     .num_kv_heads = 1,
     .head_dim_qk = 96,
     .page_size = 1,
     .batch = 2,
     .kv_len = {30, 3},
     .qo_len = {1, 1},
     .q_format = &kF32,
     .kv_format = &kE5m2,
     .interleaved = 1,
     .causal = 1,
     .window_left = 7,
     .k_scale = 1,
     .v_scale = 2},
    {.name = "prefill",
     .kind = PREFILL,
     .num_qo_heads = 8,
     .num_kv_heads = 2,
     .head_dim_qk = 64,
     .page_size = 16,
     .batch = 5,
     .kv_len = {33, 3, 0, 70, 9},
     .qo_len = {20, 5, 0, 1, 0},
     .q_format = &kF32,
     .kv_format = &kF32,
     PLAIN},
    {.name = "prefill interleaved HND strided, ALiBi, soft cap",
     .kind = PREFILL,
     .num_qo_heads = 6,
     .num_kv_heads = 3,
     .head_dim_qk = 64,
     .page_size = 7,
     .batch = 2,
     .kv_len = {50, 20},
     .qo_len = {30, 20},
     .q_format = &kF32,
     .kv_format = &kF16,
     .hnd = 1,
     .interleaved = 1,
     .strided = 1,
     .alibi = 1,
     .causal = 1,
     .window_left = 25,
     .sm_scale = 0.2f,
     .soft_cap = 5,
     .k_scale = 1,
     .v_scale = 1},
    {.name = "prefill, values narrower than keys, not causal",
     .kind = PREFILL,
     .num_qo_heads = 4,
     .num_kv_heads = 2,
     .head_dim_qk = 192,
     .head_dim_vo = 128,
     .page_size = 16,
     .batch = 2,
     .kv_len = {40, 65},
     .qo_len = {7, 33},
     .q_format = &kBf16,
     .kv_format = &kBf16,
     .causal = 0,
     .window_left = -1,
     .k_scale = 1,
     .v_scale = 1},
    {.name = "verify",
     .kind = VERIFY,
     .num_qo_heads = 8,
     .num_kv_heads = 2,
     .head_dim_qk = 64,
     .page_size = 16,
     .batch = 3,
     .kv_len = {33, 4, 160},
     .qo_len = {4, 4, 4},
     .q_format = &kF32,
     .kv_format = &kF32,
     PLAIN},
    {.name = "verify of a tree, sinks, window",
     .kind = VERIFY,
     .num_qo_heads = 5,
     .num_kv_heads = 1,
     .head_dim_qk = 64,
     .page_size = 3,
     .batch = 3,
     .kv_len = {13, 5, 77},
     .qo_len = {5, 5, 5},
     .q_format = &kF32,
     .kv_format = &kF32,
     .sinks = 1,
     .mask = 1,
     .causal = 1,
     .window_left = 40,
     .k_scale = 1,
     .v_scale = 1},
};

static fiw_workspace* new_workspace(void) {
  fiw_workspace* ws = NULL;
  fiw_error err = new_error();
  CHECK_OK(fiw_workspace_create(-1, 0, &ws, &err), err);
  if (ws == NULL) exit(1);
  return ws;
}

static void test_attention(void) {
  fiw_workspace* ws = new_workspace();
  for (int i = 0; i < COUNT(kScenarios); ++i) run_scenario(ws, &kScenarios[i]);
  fiw_workspace_free(ws);
}

static void test_batch_invariant(void) {
  fiw_plan_options plan_options = FIW_PLAN_OPTIONS_INIT;
  plan_options.batch_invariant = 1;
  plan_options.fixed_split_tokens = 64;
  fiw_workspace_options options = FIW_WORKSPACE_OPTIONS_INIT;
  options.plan = &plan_options;
  options.num_threads = 2;
  fiw_workspace* ws = NULL;
  fiw_error err = new_error();
  CHECK_OK(fiw_workspace_create_with_options(-1, &options, &ws, &err), err);
  run_scenario(ws, &kScenarios[0]);
  fiw_workspace_free(ws);
}

/* ---- ragged prefill, append, merge
 * -------------------------------------------------------------------------------------- */

static void test_ragged_prefill(void) {
  enum { kHeads = 6, kKvHeads = 2, kDim = 64, kBatch = 3 };
  const int qo_len[kBatch] = {9, 0, 5};
  const int kv_len[kBatch] = {9, 4, 3}; /* the last request has two rows that see nothing */
  int32_t qo_indptr[kBatch + 1] = {0}, kv_indptr[kBatch + 1] = {0};
  for (int r = 0; r < kBatch; ++r) {
    qo_indptr[r + 1] = qo_indptr[r] + qo_len[r];
    kv_indptr[r + 1] = kv_indptr[r] + kv_len[r];
  }
  const int rows = qo_indptr[kBatch], keys = kv_indptr[kBatch];
  float* q = random_floats(rows * kHeads * kDim);
  float* k = random_floats(keys * kKvHeads * kDim);
  float* v = random_floats(keys * kKvHeads * kDim);
  float* out = poisoned((size_t)(rows * kHeads * kDim) * sizeof *out);
  float* lse = poisoned((size_t)(rows * kHeads) * sizeof *lse);
  tensor q_t, k_t, v_t, out_t, lse_t, qo_t, kv_t;
  make3(&q_t, q, kFloat, rows, kHeads, kDim);
  make3(&k_t, k, kFloat, keys, kKvHeads, kDim);
  make3(&v_t, v, kFloat, keys, kKvHeads, kDim);
  make3(&out_t, out, kFloat, rows, kHeads, kDim);
  make2(&lse_t, lse, kFloat, rows, kHeads);
  ints(&qo_t, qo_indptr, kBatch + 1);
  ints(&kv_t, kv_indptr, kBatch + 1);
  const fiw_attention_params params = new_params(kHeads, kKvHeads, kDim);
  fiw_workspace* ws = new_workspace();
  fiw_error err = new_error();
  CHECK_OK(fiw_ragged_prefill(ws, &q_t.dl, &qo_t.dl, &k_t.dl, &v_t.dl, &kv_t.dl, &params, &out_t.dl, &lse_t.dl, NULL,
                              NULL, &err),
           err);
  double q_row[kDim], want[kDim];
  double dense_k[16 * kKvHeads * kDim], dense_v[16 * kKvHeads * kDim];
  const row_options options = {0, 0, 0, NULL};
  for (int r = 0; r < kBatch; ++r) {
    for (int i = 0; i < kv_len[r] * kKvHeads * kDim; ++i) {
      dense_k[i] = k[kv_indptr[r] * kKvHeads * kDim + i];
      dense_v[i] = v[kv_indptr[r] * kKvHeads * kDim + i];
    }
    for (int i = 0; i < qo_len[r]; ++i) {
      for (int h = 0; h < kHeads; ++h) {
        const int at = (qo_indptr[r] + i) * kHeads + h;
        for (int d = 0; d < kDim; ++d) q_row[d] = q[at * kDim + d];
        const double want_lse =
            reference_row(&params, q_row, dense_k, dense_v, h, kv_len[r], kv_len[r] - qo_len[r] + i, &options, want);
        check_near("ragged lse", lse[at], want_lse, 1e-3);
        for (int d = 0; d < kDim; ++d) check_near("ragged out", out[at * kDim + d], want[d], 1e-4);
      }
    }
  }
  CHECK(lse[qo_indptr[2] * kHeads] == -INFINITY && out[qo_indptr[2] * kHeads * kDim] == 0.0f);
  kv_indptr[2] = 1;
  CHECK_FAILS(
      fiw_ragged_prefill(ws, &q_t.dl, &qo_t.dl, &k_t.dl, &v_t.dl, &kv_t.dl, &params, &out_t.dl, NULL, NULL, NULL, &err),
      err, FIW_INVALID_ARGUMENT, FIW_REASON_QO_INDPTR, "kv_indptr[2] is 1");
  CHECK(err.index == 1);
  fiw_workspace_free(ws);
  free(q), free(k), free(v), free(out), free(lse);
}

/* fp8 with scales: stored as value / scale, saturating, NaN kept; slots that are not appended to stay as they were. */
static void test_append(void) {
  enum { kHeads = 2, kDim = 8, kPage = 4, kPages = 5, kBatch = 3, kRow = kHeads * kDim };
  const int32_t indptr[kBatch + 1] = {0, 2, 3, 3};
  const int32_t indices[3] = {3, 0, 2};
  const int32_t last[kBatch] = {1, 4, 0};
  const int32_t append_indptr[kBatch + 1] = {0, 2, 3, 3}; /* tokens 3, 4 of request 0 and 3 of request 1 */
  const int slot[3] = {3 * kPage + 3, 0 * kPage + 0, 2 * kPage + 3};
  float k[3 * kRow], v[3 * kRow];
  for (int i = 0; i < 3 * kRow; ++i) {
    unsigned char bits;
    fill_random(&kE4m3, &bits, 0);
    k[i] = (float)value_of(&kE4m3, &bits, 0) * 0.25f;
    fill_random(&kE4m3, &bits, 0);
    v[i] = (float)value_of(&kE4m3, &bits, 0) * 2.0f;
  }
  k[0] = 1000.0f, k[1] = -1000.0f, k[2] = NAN, k[3] = INFINITY;
  unsigned char k_cache[kPages * kPage * kRow], v_cache[kPages * kPage * kRow];
  memset(k_cache, 0x5A, sizeof k_cache);
  memset(v_cache, 0x5A, sizeof v_cache);
  tensor k_t, v_t, k_cache_t, v_cache_t, a, b, c, append_t;
  const int64_t cache_shape[4] = {kPages, kPage, kHeads, kDim};
  fiw_kv_cache cache = FIW_KV_CACHE_INIT;
  cache.k = make(&k_cache_t, k_cache, kE4m3.dtype, 4, cache_shape);
  cache.v = make(&v_cache_t, v_cache, kE4m3.dtype, 4, cache_shape);
  cache.k_scale = 0.25f;
  cache.v_scale = 2.0f;
  make3(&k_t, k, kFloat, 3, kHeads, kDim);
  make3(&v_t, v, kFloat, 3, kHeads, kDim);
  ints(&append_t, append_indptr, kBatch + 1);
  fiw_workspace* ws = new_workspace();
  fiw_page_table* table = NULL;
  fiw_error err = new_error();
  CHECK_OK(fiw_page_table_from_csr(kPage, kPages, ints(&a, indptr, 4), ints(&b, indices, 3), ints(&c, last, 3), NULL,
                                   &table, &err),
           err);
  CHECK_OK(fiw_append_kv(ws, &k_t.dl, &v_t.dl, &append_t.dl, &cache, table, NULL, &err), err);
  int wrong = 0;
  for (int t = 0; t < 3; ++t) {
    for (int i = 0; i < kRow; ++i) {
      const size_t at = (size_t)(slot[t] * kRow + i);
      if (value_of(&kE4m3, v_cache, at) != v[t * kRow + i] / 2.0f) ++wrong;
      if (t == 0 && i < 4) continue; /* the extremes below */
      if (value_of(&kE4m3, k_cache, at) != k[t * kRow + i] / 0.25f) ++wrong;
    }
  }
  CHECK(wrong == 0);
  CHECK(value_of(&kE4m3, k_cache, (size_t)(slot[0] * kRow)) == 448.0);
  CHECK(value_of(&kE4m3, k_cache, (size_t)(slot[0] * kRow + 1)) == -448.0);
  CHECK(isnan(value_of(&kE4m3, k_cache, (size_t)(slot[0] * kRow + 2))));
  CHECK(value_of(&kE4m3, k_cache, (size_t)(slot[0] * kRow + 3)) == 448.0);
  for (int s = 0; s < kPages * kPage; ++s) {
    if (s == slot[0] || s == slot[1] || s == slot[2]) continue;
    for (int i = 0; i < kRow; ++i) wrong += k_cache[s * kRow + i] != 0x5A || v_cache[s * kRow + i] != 0x5A;
  }
  CHECK(wrong == 0);
  cache.v = cache.k;
  CHECK_FAILS(fiw_append_kv(ws, &k_t.dl, &v_t.dl, &append_t.dl, &cache, table, NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_OVERLAP, "kv.v overlaps kv.k");
  cache.v = &v_cache_t.dl;
  make3(&v_t, v, kFloat, 2, kHeads, kDim);
  CHECK_FAILS(fiw_append_kv(ws, &k_t.dl, &v_t.dl, &append_t.dl, &cache, table, NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_SHAPE, "v ");
  fiw_page_table_free(table);
  fiw_workspace_free(ws);
}

static void test_merge_states(void) {
  enum { kRows = 4, kHeads = 3, kDim = 16, kParts = 3, kStates = kRows * kHeads };
  float *outs[kParts], *lses[kParts];
  tensor out_t[kParts], lse_t[kParts], merged_t, merged_lse_t;
  const DLTensor *part_outs[kParts], *part_lses[kParts];
  for (int i = 0; i < kParts; ++i) {
    outs[i] = random_floats(kStates * kDim);
    lses[i] = random_floats(kStates);
    part_outs[i] = make3(&out_t[i], outs[i], kFloat, kRows, kHeads, kDim);
    part_lses[i] = make2(&lse_t[i], lses[i], kFloat, kRows, kHeads);
  }
  lses[1][0] = -INFINITY;                                  /* one empty part */
  for (int i = 0; i < kParts; ++i) lses[i][1] = -INFINITY; /* all empty */
  lses[2][2] = 300.0f;                                     /* one that outweighs the rest */
  double want[kStates][kDim], want_lse[kStates];
  for (int s = 0; s < kStates; ++s) {
    double top = -INFINITY, sum = 0;
    for (int i = 0; i < kParts; ++i) top = fmax(top, lses[i][s]);
    for (int d = 0; d < kDim; ++d) want[s][d] = 0;
    for (int i = 0; top > -INFINITY && i < kParts; ++i) {
      sum += exp(lses[i][s] - top);
      for (int d = 0; d < kDim; ++d) want[s][d] += exp(lses[i][s] - top) * outs[i][s * kDim + d];
    }
    for (int d = 0; sum > 0 && d < kDim; ++d) want[s][d] /= sum;
    want_lse[s] = sum > 0 ? top + log(sum) : -INFINITY;
  }
  float merged[kStates * kDim], merged_lse[kStates];
  memset(merged, 0xFF, sizeof merged);
  memset(merged_lse, 0xFF, sizeof merged_lse);
  make3(&merged_t, merged, kFloat, kRows, kHeads, kDim);
  make2(&merged_lse_t, merged_lse, kFloat, kRows, kHeads);
  fiw_workspace* ws = new_workspace();
  fiw_error err = new_error();
  CHECK_OK(fiw_merge_states(ws, part_outs, part_lses, kParts, &merged_t.dl, &merged_lse_t.dl, NULL, &err), err);
  for (int s = 0; s < kStates; ++s) {
    check_near("merged lse", merged_lse[s], want_lse[s], 1e-4);
    for (int d = 0; d < kDim; ++d) check_near("merged out", merged[s * kDim + d], want[s][d], 1e-5);
  }
  CHECK_OK(fiw_merge_states(ws, part_outs, part_lses, kParts, &out_t[0].dl, NULL, NULL, &err), err); /* in place */
  for (int i = 0; i < kStates * kDim; ++i) check_near("merged in place", outs[0][i], merged[i], 1e-6);

  CHECK_FAILS(fiw_merge_states(ws, part_outs, part_lses, 0, &merged_t.dl, NULL, NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_PARTIAL_STATES, "num_parts is 0");
  CHECK_FAILS(fiw_merge_states(ws, NULL, part_lses, kParts, &merged_t.dl, NULL, NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_OPTIONS, "part_outs is null");
  part_lses[1] = NULL;
  CHECK_FAILS(fiw_merge_states(ws, part_outs, part_lses, kParts, &merged_t.dl, NULL, NULL, &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_TENSOR_NULL, "part_lses[1] is null");
  for (int i = 0; i < kParts; ++i) free(outs[i]), free(lses[i]);
  fiw_workspace_free(ws);
}

/* ---- graphs: on the CPU a replay calls the body again
 * ------------------------------------------------------------------------------------------------------------ */

/* What a body is called with. */
typedef struct layers {
  fiw_graph* graph;
  problem* p;
  const DLTensor *k, *v; /* rows to append, or null */
  int calls;
  int32_t batch;     /* of the last call */
  fiw_status answer; /* returned where the layers are fine */
} layers;

static fiw_status run_layers(void* context, int32_t batch) {
  layers* l = context;
  problem* p = l->p;
  fiw_error err = new_error();
  ++l->calls;
  l->batch = batch;
  if (l->k != NULL) CHECK_OK(fiw_graph_append_kv(l->graph, l->k, l->v, &p->cache, NULL, &err), err);
  CHECK_OK(fiw_graph_run(l->graph, 0, &p->q.dl, &p->cache, &p->out.dl, &p->lse.dl, &p->extras, NULL, &err), err);
  CHECK_FAILS(fiw_graph_replay(l->graph, batch, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "replay() is called within capture()'s body");
  return l->answer;
}

static fiw_graph_options graph_options_of(const problem* p) {
  fiw_graph_options options = FIW_GRAPH_OPTIONS_INIT;
  options.window = p->s->kind == DECODE ? 0 : p->s->qo_len[0];
  options.max_batch = p->s->batch;
  options.max_pages = fiw_page_table_indptr(p->table)[p->s->batch] + 1;
  options.page_size = p->s->page_size;
  options.num_pages = p->num_pages;
  return options;
}

/* A graph of one kind of layer, for the problem's table and smaller ones. */
static fiw_graph* new_graph(fiw_workspace* ws, const problem* p, const fiw_device_page_table* live,
                            int plan_on_device) {
  const fiw_step_spec spec = spec_of(p);
  const fiw_step_spec* kinds[1] = {&spec};
  fiw_graph_options options = graph_options_of(p);
  options.kinds = kinds;
  options.num_kinds = 1;
  options.live_table = live;
  options.plan_on_device = plan_on_device;
  fiw_graph* graph = NULL;
  fiw_error err = new_error();
  CHECK_OK(fiw_graph_create(ws, &options, &graph, &err), err);
  return graph;
}

static fiw_graph_stats graph_stats_of(const fiw_graph* graph) {
  fiw_graph_stats stats = FIW_GRAPH_STATS_INIT;
  fiw_error err = new_error();
  CHECK_OK(fiw_graph_get_stats(graph, &stats, &err), err);
  return stats;
}

static void run_graph_scenario(fiw_workspace* ws, const scenario* s) {
  static problem p;
  fiw_error err = new_error();
  build(&p, s);
  fiw_graph* graph = new_graph(ws, &p, NULL, 1);
  layers l = {graph, &p, NULL, NULL, 0, 0, FIW_OK};
  const int buckets = fiw_graph_num_buckets(graph);
  CHECK(buckets >= 1 && fiw_graph_buckets(graph)[buckets - 1] == s->batch);
  CHECK_OK(fiw_graph_capture(graph, run_layers, &l, NULL, &err), err);
  CHECK(l.calls == buckets && l.batch == s->batch);
  poison_results(&p);
  CHECK_OK(fiw_graph_step(graph, p.table, NULL, &err), err);
  check_results(&p, "a graph's step", 1);
  poison_results(&p);
  CHECK_OK(fiw_graph_replay(graph, s->batch, NULL, &err), err);
  check_results(&p, "a replay", 1);
  CHECK_OK(fiw_graph_check(graph, NULL, &err), err);

  /* A capture of the caller's own. */
  int32_t bucket = 0;
  CHECK_OK(fiw_graph_prepare(graph, p.table, &bucket, NULL, &err), err);
  CHECK(bucket == s->batch);
  CHECK_OK(fiw_graph_prepare(graph, p.table, NULL, NULL, &err), err);
  bucket = 0;
  CHECK_OK(fiw_graph_begin(graph, s->batch, &bucket, NULL, &err), err);
  CHECK(bucket == s->batch);
  CHECK_OK(fiw_graph_begin(graph, s->batch, NULL, NULL, &err), err);
  poison_results(&p);
  CHECK_OK(fiw_graph_run(graph, 0, &p.q.dl, &p.cache, &p.out.dl, &p.lse.dl, &p.extras, NULL, &err), err);
  check_results(&p, "a layer after begin", 1);
  const fiw_graph_stats stats = graph_stats_of(graph);
  CHECK(stats.captures == (uint64_t)buckets && stats.replays == 2 && stats.plans == 1 && stats.plan_hits == 2);
  CHECK(stats.trips == 0 && stats.bytes > 0);

  /* A body that fails leaves what was captured. */
  l.answer = FIW_UNSUPPORTED;
  CHECK_FAILS(fiw_graph_capture(graph, run_layers, &l, NULL, &err), err, FIW_UNSUPPORTED, FIW_REASON_NONE,
              "body returned 11 (UNSUPPORTED) for 1 requests");
  CHECK(graph_stats_of(graph).captures == (uint64_t)buckets);
  poison_results(&p);
  CHECK_FAILS(fiw_graph_step(graph, p.table, NULL, &err), err, FIW_UNSUPPORTED, FIW_REASON_NONE, "body returned 11");
  check_results(&p, "a step whose body then fails", 1);
  fiw_graph_free(graph);
  destroy(&p);
}

static void test_graphs(void) {
  fiw_workspace* ws = new_workspace();
  for (int i = 0; i < COUNT(kScenarios); ++i) {
    if (kScenarios[i].kind != PREFILL && kScenarios[i].batch > 0 && kScenarios[i].qo_len[0] <= 16) {
      run_graph_scenario(ws, &kScenarios[i]);
    }
  }
  fiw_workspace_free(ws);
}

/* The last token of each request is taken from a float32 cache, and comes back by a graph. */
static void test_graph_append(void) {
  static problem p;
  build(&p, &kScenarios[0]);
  const scenario* s = p.s;
  const int row = s->num_kv_heads * s->head_dim_qk;
  float* k_cache = (float*)(void*)p.k_memory;
  float* v_cache = (float*)(void*)p.v_memory;
  float* k = poisoned((size_t)(s->batch * row) * sizeof *k);
  float* v = poisoned((size_t)(s->batch * row) * sizeof *v);
  const int32_t* indptr = fiw_page_table_indptr(p.table);
  const int32_t* indices = fiw_page_table_indices(p.table);
  for (int r = 0; r < s->batch; ++r) {
    if (s->kv_len[r] == 0) continue;
    const int token = (s->kv_len[r] - 1) % s->page_size;
    const size_t at = slot_offset(&p, p.k_page, indices[indptr[r + 1] - 1], token, 0, s->head_dim_qk);
    memcpy(k + r * row, k_cache + at, (size_t)row * sizeof *k);
    memcpy(v + r * row, v_cache + at, (size_t)row * sizeof *v);
    memset(k_cache + at, 0xFF, (size_t)row * sizeof *k);
    memset(v_cache + at, 0xFF, (size_t)row * sizeof *v);
  }
  tensor k_t, v_t;
  fiw_workspace* ws = new_workspace();
  fiw_graph* graph = new_graph(ws, &p, NULL, 1);
  layers l = {graph,
              &p,
              make3(&k_t, k, kFloat, s->batch, s->num_kv_heads, s->head_dim_qk),
              make3(&v_t, v, kFloat, s->batch, s->num_kv_heads, s->head_dim_qk),
              0,
              0,
              FIW_OK};
  fiw_error err = new_error();
  CHECK_OK(fiw_graph_capture(graph, run_layers, &l, NULL, &err), err);
  poison_results(&p);
  CHECK_OK(fiw_graph_step(graph, p.table, NULL, &err), err);
  check_results(&p, "a graph that appends", 1);
  fiw_graph_free(graph);
  fiw_workspace_free(ws);
  free(k);
  free(v);
  destroy(&p);
}

static void test_live_graph(void) {
  static problem p;
  build(&p, &kScenarios[0]);
  const int batch = p.s->batch;
  const int32_t entries = fiw_page_table_indptr(p.table)[batch];
  int32_t indptr[MAX_BATCH + 1], last[MAX_BATCH];
  int32_t* indices = poisoned((size_t)(entries + 1) * sizeof *indices);
  memcpy(indptr, fiw_page_table_indptr(p.table), (size_t)(batch + 1) * sizeof *indptr);
  memcpy(indices, fiw_page_table_indices(p.table), (size_t)entries * sizeof *indices);
  memcpy(last, fiw_page_table_last_page_len(p.table), (size_t)batch * sizeof *last);
  tensor a, b, c;
  fiw_device_page_table live = FIW_DEVICE_PAGE_TABLE_INIT;
  live.page_size = p.s->page_size;
  live.num_pages = p.num_pages;
  live.indptr = ints(&a, indptr, batch + 1);
  live.indices = ints(&b, indices, entries + 1);
  live.last_page_len = ints(&c, last, batch);
  fiw_workspace* ws = new_workspace();
  fiw_error err = new_error();
  for (int on_device = 0; on_device < 2; ++on_device) {
    fiw_graph* graph = new_graph(ws, &p, &live, on_device);
    layers l = {graph, &p, NULL, NULL, 0, 0, FIW_OK};
    CHECK_OK(fiw_graph_capture(graph, run_layers, &l, NULL, &err), err);
    if (on_device) {
      CHECK_FAILS(fiw_graph_prepare(graph, p.table, NULL, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
                  "call replay()");
    } else {
      CHECK_OK(fiw_graph_prepare(graph, p.table, NULL, NULL, &err), err);
    }
    poison_results(&p);
    CHECK_OK(fiw_graph_replay(graph, batch, NULL, &err), err);
    check_results(&p, "a replay of a live table", 1);

    const int32_t page = indices[3]; /* request 1's only one */
    indices[3] = p.num_pages;
    poison_results(&p);
    CHECK_OK(fiw_graph_replay(graph, batch, NULL, &err), err);
    CHECK(isnan(p.lse_memory[0])); /* no work was done */
    CHECK_FAILS(fiw_graph_check(graph, NULL, &err), err, FIW_STALE_PLAN, FIW_REASON_PAGE_INDEX, "request 1 owns page");
    CHECK(err.index == 1 && graph_stats_of(graph).trips == 1);
    CHECK_OK(fiw_graph_check(graph, NULL, &err), err);
    indices[3] = page;
    CHECK_OK(fiw_graph_replay(graph, batch, NULL, &err), err);
    check_results(&p, "a replay after a bad table", 1);
    fiw_graph_free(graph);
  }
  fiw_workspace_free(ws);
  free(indices);
  destroy(&p);
}

static void test_bad_graphs(void) {
  static problem p;
  build(&p, &kScenarios[0]);
  fiw_workspace* ws = new_workspace();
  fiw_error err = new_error();
  const fiw_step_spec spec = spec_of(&p);
  const fiw_step_spec* kinds[2] = {&spec, NULL};
  fiw_graph_options options = graph_options_of(&p);
  options.kinds = kinds;
  options.num_kinds = 1;
  const fiw_graph_options good = options;
  fiw_graph* none = (fiw_graph*)&p;
#define CHECK_CREATE_FAILS(why, text)                                                             \
  CHECK_FAILS(fiw_graph_create(ws, &options, &none, &err), err, FIW_INVALID_ARGUMENT, why, text); \
  CHECK(none == NULL);                                                                            \
  none = (fiw_graph*)&p;                                                                          \
  options = good
  options.struct_size = 8;
  CHECK_CREATE_FAILS(FIW_REASON_STRUCT_SIZE, "options.struct_size is 8");
  options.num_kinds = 0;
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "options.num_kinds is 0, expected at least 1");
  options.kinds = NULL;
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "options.kinds is null");
  options.num_kinds = 2;
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "options.kinds[1] is null");
  options.window = 4097;
  CHECK_CREATE_FAILS(FIW_REASON_QO_INDPTR, "window is 4097, expected 1..4096");
  options.window = -1;
  CHECK_CREATE_FAILS(FIW_REASON_QO_INDPTR, "window is -1");
  options.max_batch = 0;
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "max_batch is 0");
  options.max_pages = 0;
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "max_pages is 0");
  options.page_size = 0;
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "page_size is 0");
  options.num_pages = 0;
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "num_pages is 0");
  static const int32_t descending[2] = {3, 2};
  static const int32_t two[2] = {2, 4};
  tensor a, b, c;
  options.buckets = ints(&a, descending, 2);
  CHECK_CREATE_FAILS(FIW_REASON_OPTIONS, "buckets hold 2 after 3");
  a.dl.dtype = kI64;
  options.buckets = &a.dl;
  CHECK_CREATE_FAILS(FIW_REASON_INDEX_TYPE, "options.buckets: int64, expected int32");
  fiw_device_page_table live = FIW_DEVICE_PAGE_TABLE_INIT;
  options.live_table = &live;
  CHECK_CREATE_FAILS(FIW_REASON_TENSOR_NULL, "options.live_table.indptr is null");
  live.page_size = p.s->page_size;
  live.num_pages = p.num_pages;
  live.indptr = ints(&a, p.qo_indptr, p.s->batch + 1);
  live.indices = ints(&b, p.qo_indptr, 2);
  live.last_page_len = ints(&c, p.qo_indptr, p.s->batch);
  options.live_table = &live;
  CHECK_CREATE_FAILS(FIW_REASON_INDPTR_LENGTH, "live_table.indices has 2 entries");
  c.dl.device.device_type = kDLCUDA;
  options.live_table = &live;
  CHECK_CREATE_FAILS(FIW_REASON_TENSOR_DEVICE,
                     "options.live_table.last_page_len is on CUDA device 0, expected the CPU");
#undef CHECK_CREATE_FAILS
  CHECK_FAILS(fiw_graph_create(ws, NULL, &none, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "options is null");
  CHECK_FAILS(fiw_graph_create(ws, &good, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS, "out is null");
  CHECK_FAILS(fiw_graph_create(NULL, &good, &none, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS, "ws is null");

  fiw_graph* graph = NULL;
  options.buckets = ints(&a, two, 2);
  CHECK_OK(fiw_graph_create(ws, &options, &graph, &err), err);
  CHECK(fiw_graph_num_buckets(graph) == 2 && fiw_graph_buckets(graph)[0] == 2 && fiw_graph_buckets(graph)[1] == 4);
  CHECK(fiw_graph_num_buckets(NULL) == 0 && fiw_graph_buckets(NULL) == NULL);
  fiw_graph_free(NULL);
#define CHECK_BAD(call, why, text) CHECK_FAILS(call, err, FIW_INVALID_ARGUMENT, why, text)
  CHECK_BAD(fiw_graph_capture(NULL, run_layers, NULL, NULL, &err), FIW_REASON_OPTIONS, "graph is null");
  CHECK_BAD(fiw_graph_capture(graph, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS, "body is null");
  CHECK_BAD(fiw_graph_step(graph, p.table, NULL, &err), FIW_REASON_OPTIONS, "nothing was captured");
  layers l = {graph, &p, NULL, NULL, 0, 0, FIW_OK};
  CHECK_OK(fiw_graph_capture(graph, run_layers, &l, NULL, &err), err);
  CHECK_BAD(fiw_graph_run(graph, 0, &p.q.dl, &p.cache, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS,
            "no step was begun");
  CHECK_BAD(fiw_graph_begin(graph, 5, NULL, NULL, &err), FIW_REASON_BATCH, "5 requests");
  CHECK_BAD(fiw_graph_replay(graph, -1, NULL, &err), FIW_REASON_BATCH, "-1 requests");
  CHECK_BAD(fiw_graph_step(graph, NULL, NULL, &err), FIW_REASON_TABLE_NULL, "table is null");
  CHECK_BAD(fiw_graph_prepare(graph, NULL, NULL, NULL, &err), FIW_REASON_TABLE_NULL, "table is null");
  CHECK_OK(fiw_graph_prepare(graph, p.table, NULL, NULL, &err), err);
  CHECK_BAD(fiw_graph_replay(graph, 1, NULL, &err), FIW_REASON_BATCH, "not the one prepared last");
  CHECK_OK(fiw_graph_begin(graph, 3, NULL, NULL, &err), err);
  CHECK_BAD(fiw_graph_run(graph, -1, &p.q.dl, &p.cache, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS,
            "kind is -1");
  CHECK_BAD(fiw_graph_run(graph, 1, &p.q.dl, &p.cache, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS,
            "kind is 1");
  CHECK_BAD(fiw_graph_run(graph, 0, NULL, &p.cache, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_TENSOR_NULL,
            "q is null");
  CHECK_BAD(fiw_graph_run(graph, 0, &p.q.dl, NULL, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS,
            "kv is null");
  CHECK_BAD(fiw_graph_append_kv(graph, NULL, &p.q.dl, &p.cache, NULL, &err), FIW_REASON_TENSOR_NULL, "k is null");
  CHECK_BAD(fiw_graph_append_kv(graph, &p.q.dl, &p.q.dl, &p.cache, NULL, &err), FIW_REASON_TENSOR_SHAPE,
            "k has 8 heads");
  CHECK_BAD(fiw_graph_check(NULL, NULL, &err), FIW_REASON_OPTIONS, "graph is null");
  fiw_graph_stats stats = FIW_GRAPH_STATS_INIT;
  stats.struct_size = 1;
  CHECK_BAD(fiw_graph_get_stats(graph, &stats, &err), FIW_REASON_STRUCT_SIZE, "stats.struct_size is 1");
  CHECK_BAD(fiw_graph_get_stats(graph, NULL, &err), FIW_REASON_OPTIONS, "stats is null");
  CHECK_BAD(fiw_graph_get_stats(NULL, &stats, &err), FIW_REASON_OPTIONS, "graph is null");
#undef CHECK_BAD
  poison_results(&p);
  CHECK_OK(fiw_graph_step(graph, p.table, NULL, &err), err);
  check_results(&p, "a step after many bad calls", 1);
  fiw_graph_free(graph);
  fiw_workspace_free(ws);
  destroy(&p);
}

/* ---- version, structs, errors
 * ------------------------------------------------------------------------------------------- */

static void test_version(void) {
  char from_macros[32];
  snprintf(from_macros, sizeof from_macros, "%d.%d.%d", FIW_VERSION_MAJOR, FIW_VERSION_MINOR, FIW_VERSION_PATCH);
  CHECK(strcmp(fiw_version(), from_macros) == 0);
  CHECK(strcmp(fiw_version(), FIW_TEST_VERSION) == 0);
  CHECK(fiw_abi_version() == FIW_ABI_VERSION);
  fiw_error err = new_error();
  CHECK_OK(fiw_check_abi(FIW_ABI_VERSION, &err), err);
  CHECK_FAILS(fiw_check_abi(FIW_ABI_VERSION + 1, &err), err, FIW_UNSUPPORTED, FIW_REASON_ABI_VERSION, "ABI version 2");
  CHECK(strstr(err.message, "has 1") != NULL);

  static const struct {
    fiw_status status;
    const char* name;
  } names[] = {{FIW_OK, "OK"},
               {FIW_INVALID_ARGUMENT, "INVALID_ARGUMENT"},
               {FIW_UNSUPPORTED, "UNSUPPORTED"},
               {FIW_CLOSED, "CLOSED"},
               {FIW_BUSY, "BUSY"},
               {FIW_STALE_PLAN, "STALE_PLAN"},
               {FIW_FAILED, "FAILED"},
               {FIW_OUT_OF_MEMORY, "OUT_OF_MEMORY"},
               {FIW_WORKSPACE_TOO_SMALL, "WORKSPACE_TOO_SMALL"},
               {FIW_UNAVAILABLE, "UNAVAILABLE"},
               {FIW_NO_DEVICE, "NO_DEVICE"},
               {FIW_BACKEND, "BACKEND"},
               {FIW_INTERNAL, "INTERNAL"},
               {(fiw_status)7, "unknown status"}};
  for (int i = 0; i < COUNT(names); ++i) CHECK(strcmp(fiw_status_name(names[i].status), names[i].name) == 0);
  CHECK(strcmp(fiw_status_name((fiw_status)999), "unknown status") == 0);
}

/* The INIT macro and the init function agree in every byte; the function never writes past the size it was told. */
#define CHECK_INIT(type, macro)                                                                            \
  do {                                                                                                     \
    struct {                                                                                               \
      type value;                                                                                          \
      unsigned char after[16];                                                                             \
    } a, b;                                                                                                \
    const type from_macro = macro;                                                                         \
    memset(&a, 0xAA, sizeof a);                                                                            \
    memset(&b, 0xAA, sizeof b);                                                                            \
    type##_init(&a.value, sizeof a.value);                                                                 \
    CHECK(memcmp(&a.value, &from_macro, sizeof from_macro) == 0);                                          \
    CHECK(a.value.struct_size == sizeof(type));                                                            \
    CHECK(memcmp(a.after, b.after, sizeof a.after) == 0);                                                  \
    memset(&a, 0xAA, sizeof a);                                                                            \
    type##_init(&a.value, sizeof(size_t));                                                                 \
    CHECK(a.value.struct_size == sizeof(size_t));                                                          \
    CHECK(memcmp((char*)&a + sizeof(size_t), (char*)&b + sizeof(size_t), sizeof a - sizeof(size_t)) == 0); \
    type##_init(&a.value, sizeof a);                                                                       \
    CHECK(a.value.struct_size == sizeof a);                                                                \
    CHECK(memcmp(a.after, b.after, sizeof a.after) == 0);                                                  \
    memset(&a, 0xAA, sizeof a);                                                                            \
    type##_init(&a.value, 3);                                                                              \
    CHECK(memcmp(&a, &b, sizeof a) == 0);                                                                  \
    type##_init(NULL, sizeof(type));                                                                       \
  } while (0)

static void test_struct_init(void) {
  CHECK_INIT(fiw_error, FIW_ERROR_INIT);
  CHECK_INIT(fiw_attention_params, FIW_ATTENTION_PARAMS_INIT);
  CHECK_INIT(fiw_workspace_limits, FIW_WORKSPACE_LIMITS_INIT);
  CHECK_INIT(fiw_plan_options, FIW_PLAN_OPTIONS_INIT);
  CHECK_INIT(fiw_allocator, FIW_ALLOCATOR_INIT);
  CHECK_INIT(fiw_workspace_options, FIW_WORKSPACE_OPTIONS_INIT);
  CHECK_INIT(fiw_kv_cache, FIW_KV_CACHE_INIT);
  CHECK_INIT(fiw_attention_extras, FIW_ATTENTION_EXTRAS_INIT);
  CHECK_INIT(fiw_step_spec, FIW_STEP_SPEC_INIT);
  CHECK_INIT(fiw_plan_info, FIW_PLAN_INFO_INIT);
  CHECK_INIT(fiw_device_props, FIW_DEVICE_PROPS_INIT);
  CHECK_INIT(fiw_workspace_stats, FIW_WORKSPACE_STATS_INIT);
  CHECK_INIT(fiw_device_page_table, FIW_DEVICE_PAGE_TABLE_INIT);
  CHECK_INIT(fiw_graph_options, FIW_GRAPH_OPTIONS_INIT);
  CHECK_INIT(fiw_graph_stats, FIW_GRAPH_STATS_INIT);
}

static void test_error_struct(void) {
  CHECK(fiw_check_abi(0, NULL) == FIW_UNSUPPORTED);
  CHECK(fiw_check_abi(FIW_ABI_VERSION, NULL) == FIW_OK);
  fiw_error err = new_error();
  fiw_check_abi(0, &err);
  CHECK(err.message[0] != '\0' && err.message[255] == '\0' && err.index == -1 && err.bytes_required == 0);
  CHECK_OK(fiw_check_abi(FIW_ABI_VERSION, &err), err);

  /* Too small: untouched. Larger than known: the known part is filled. Nothing is done in either case. */
  fiw_workspace* ws = NULL;
  memset(&err, 0x77, sizeof err);
  err.struct_size = 0;
  fiw_error before = err;
  CHECK(fiw_workspace_create(-1, 0, &ws, &err) == FIW_INVALID_ARGUMENT && ws == NULL);
  CHECK(memcmp(&err, &before, sizeof err) == 0);
  err.struct_size = sizeof err - 1;
  before = err;
  CHECK(fiw_workspace_create(-1, 0, &ws, &err) == FIW_INVALID_ARGUMENT && ws == NULL);
  CHECK(memcmp(&err, &before, sizeof err) == 0);
  err.struct_size = sizeof err + 8;
  CHECK_FAILS(fiw_workspace_create(-1, 0, &ws, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_STRUCT_SIZE,
              "err.struct_size");
  CHECK(ws == NULL);
}

/* ---- workspaces
 * ------------------------------------------------------------------------------------------------------------ */

typedef struct pool {
  int live;
  int calls;
  int refuse;
  fiw_workspace* ws; /* set: the next allocation lets another thread try this workspace */
  problem* p;
  fiw_status tried[5];
  const fiw_step* step;
  fiw_graph* graph;
} pool;

static void* try_workspace(void* context) {
  pool* memory = context;
  memory->tried[0] = fiw_workspace_invalidate_runtime_cache(memory->ws, NULL);
  memory->tried[1] = call_once(memory->ws, memory->p, NULL, NULL);
  /* Busy is said before any other argument is judged. */
  memory->tried[2] = fiw_decode(memory->ws, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
  memory->tried[3] = fiw_step_run(memory->step, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
  memory->tried[4] = fiw_graph_run(memory->graph, -1, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
  return NULL;
}

static void* pool_allocate(void* context, size_t bytes, size_t alignment, void* stream) {
  pool* memory = context;
  (void)stream;
  ++memory->calls;
  if (memory->refuse) return NULL;
  if (memory->ws != NULL) {
    pthread_t other;
    if (pthread_create(&other, NULL, try_workspace, memory) != 0 || pthread_join(other, NULL) != 0) abort();
    memory->ws = NULL;
  }
  ++memory->live;
  return aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

static void pool_free(void* context, void* memory, size_t bytes, void* stream) {
  (void)bytes;
  (void)stream;
  --((pool*)context)->live;
  free(memory);
}

static void test_workspace(void) {
  fiw_error err = new_error();
  fiw_workspace* ws = NULL;
  CHECK(fiw_compiled_with(FIW_DEVICE_CPU) == 1);
  CHECK(fiw_compiled_with(2) == 0 && fiw_compiled_with(-1) == 0);
  if (!fiw_compiled_with(FIW_DEVICE_CUDA)) {
    fiw_workspace* before = (fiw_workspace*)&err;
    ws = before;
    CHECK_FAILS(fiw_workspace_create(0, 0, &ws, &err), err, FIW_UNAVAILABLE, FIW_REASON_BACKEND_NOT_BUILT,
                "device_index is 0");
    CHECK(ws == NULL);
    CHECK_OK(fiw_workspace_invalidate_runtime_cache(ws, &err), err);
  }
  CHECK_FAILS(fiw_workspace_create(-2, 0, &ws, &err), err, FIW_NO_DEVICE, FIW_REASON_DEVICE_MISSING, "-2");
  CHECK(ws == NULL);
  CHECK_FAILS(fiw_workspace_create(-1, 0, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS, "out is null");

  ws = new_workspace();
  int32_t device = 7;
  CHECK_OK(fiw_workspace_device_index(ws, &device, &err), err);
  CHECK(device == -1 && fiw_workspace_closed(ws) == 0);
  CHECK_FAILS(fiw_workspace_device_index(ws, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "device_index is null");
  CHECK_FAILS(fiw_workspace_device_index(NULL, &device, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "ws is null");
  fiw_device_props props = FIW_DEVICE_PROPS_INIT;
  CHECK_OK(fiw_workspace_device_props(ws, &props, &err), err);
  CHECK(props.kind == FIW_DEVICE_CPU && props.num_workers >= 1 && props.struct_size == sizeof props);
  fiw_workspace_close(ws);
  fiw_workspace_close(ws);
  CHECK(fiw_workspace_closed(ws) == 1);
  CHECK_OK(fiw_workspace_device_index(ws, &device, &err), err);
  CHECK_OK(fiw_workspace_device_props(ws, &props, &err), err);
  fiw_workspace_free(ws);

  fiw_workspace_close(NULL);
  fiw_workspace_free(NULL);
  CHECK(fiw_workspace_closed(NULL) == 1 && fiw_workspace_verify_cuda_graph(NULL) == 0);
  CHECK_OK(fiw_workspace_invalidate_runtime_cache(NULL, &err), err);
  CHECK_OK(fiw_workspace_invalidate_prefill_runtime_cache(NULL, &err), err);
  CHECK_OK(fiw_workspace_invalidate_verify_runtime_cache(NULL, &err), err);
}

static void test_options(void) {
  fiw_error err = new_error();
  fiw_workspace* ws = NULL;
  fiw_workspace_options options = FIW_WORKSPACE_OPTIONS_INIT;
  CHECK_OK(fiw_workspace_create_with_options(-1, NULL, &ws, &err), err);
  fiw_workspace_free(ws);
  options.verify_cuda_graph = 1;
  CHECK_OK(fiw_workspace_create_with_options(-1, &options, &ws, &err), err);
  CHECK(fiw_workspace_verify_cuda_graph(ws) == 1);
  fiw_workspace_free(ws);
  options.verify_cuda_graph = 0;
  CHECK_OK(fiw_workspace_create_with_options(-1, &options, &ws, &err), err);
  CHECK(fiw_workspace_verify_cuda_graph(ws) == 0);
  fiw_workspace_free(ws);

#define CHECK_OPTIONS_FAIL(why, text) \
  CHECK_FAILS(fiw_workspace_create_with_options(-1, &options, &ws, &err), err, FIW_INVALID_ARGUMENT, why, text)
  options.verify_cuda_graph = 2;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "verify_cuda_graph is 2");
  CHECK(ws == NULL);
  fiw_workspace_options_init(&options, sizeof options);
  options.cache_entries = 0;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "cache_entries is 0");
  fiw_workspace_options_init(&options, sizeof options);
  options.num_threads = -1;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "num_threads is -1");
  fiw_workspace_options_init(&options, sizeof options);
  options.cuda_route = 8;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "cuda_route is 8");
  options.cuda_route = FIW_CUDA_ROUTE_TILE;
  options.reserved = 1;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "reserved is 1");
  fiw_workspace_options_init(&options, sizeof options - 4);
  CHECK_OPTIONS_FAIL(FIW_REASON_STRUCT_SIZE, "options.struct_size");
  options.struct_size = 0;
  CHECK_OPTIONS_FAIL(FIW_REASON_STRUCT_SIZE, "options.struct_size is 0");
  options.struct_size = sizeof options + 8;
  CHECK_OPTIONS_FAIL(FIW_REASON_STRUCT_SIZE, "options.struct_size");

  fiw_workspace_options_init(&options, sizeof options);
  fiw_allocator allocator = FIW_ALLOCATOR_INIT;
  allocator.allocate = pool_allocate;
  options.allocator = &allocator;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "options.allocator.free is null");
  allocator.struct_size = 1;
  CHECK_OPTIONS_FAIL(FIW_REASON_STRUCT_SIZE, "options.allocator.struct_size is 1");
  options.allocator = NULL;

  fiw_workspace_limits limits = FIW_WORKSPACE_LIMITS_INIT;
  options.limits = &limits;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "options.limits.params is null");
  fiw_attention_params params = new_params(8, 2, 64);
  limits.params = &params;
  limits.page_size = 0;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "page_size is 0");
  limits.page_size = 16;
  limits.reserved = 1;
  CHECK_OPTIONS_FAIL(FIW_REASON_OPTIONS, "reserved is 1");
  limits.reserved = 0;
  limits.kv_dtype.lanes = 2;
  CHECK_OPTIONS_FAIL(FIW_REASON_TENSOR_DTYPE, "options.limits.kv_dtype");
#undef CHECK_OPTIONS_FAIL
}

/* All memory comes from the caller's pool and goes back; running out is an error; a second thread is turned away. */
static void test_allocator_and_busy(void) {
  static const scenario s = {.name = "busy",
                             .kind = DECODE,
                             .num_qo_heads = 8,
                             .num_kv_heads = 2,
                             .head_dim_qk = 64,
                             .page_size = 16,
                             .batch = 4,
                             .kv_len = {3000, 700, 1, 900},
                             .qo_len = {1, 1, 1, 1},
                             .q_format = &kF32,
                             .kv_format = &kF32,
                             PLAIN};
  static problem p;
  pool memory = {0};
  fiw_allocator allocator = FIW_ALLOCATOR_INIT;
  allocator.allocate = pool_allocate;
  allocator.free = pool_free;
  allocator.context = &memory;
  fiw_plan_options plan_options = FIW_PLAN_OPTIONS_INIT; /* many small splits, so that scratch must grow in the call */
  plan_options.batch_invariant = 1;
  plan_options.fixed_split_tokens = 16;
  fiw_workspace_options options = FIW_WORKSPACE_OPTIONS_INIT;
  options.allocator = &allocator;
  options.plan = &plan_options;
  options.workspace_bytes = 64;
  fiw_workspace* ws = NULL;
  fiw_error err = new_error();
  build(&p, &s);
  CHECK_OK(fiw_workspace_create_with_options(-1, &options, &ws, &err), err);
  static const int32_t no_indptr[1] = {0};
  tensor a, b, c;
  fiw_page_table* no_requests = NULL;
  fiw_step* step = NULL;
  const fiw_step_spec spec = spec_of(&p);
  CHECK_OK(fiw_page_table_from_csr(16, 0, ints(&a, no_indptr, 1), ints(&b, NULL, 0), ints(&c, NULL, 0), NULL,
                                   &no_requests, &err),
           err);
  CHECK_OK(fiw_plan_decode(ws, no_requests, &spec, &step, &err), err);
  memory.p = &p;
  memory.step = step;
  memory.graph = new_graph(ws, &p, NULL, 1);
  memory.ws = ws;
  CHECK_OK(call_once(ws, &p, &p.lse.dl, &err), err);
  CHECK(memory.ws == NULL); /* the other thread has been there */
  for (int i = 0; i < COUNT(memory.tried); ++i) CHECK(memory.tried[i] == FIW_BUSY);
  fiw_step_free(step);
  fiw_graph_free(memory.graph);
  fiw_page_table_free(no_requests);
  check_results(&p, "a call that another thread disturbed", 1);
  CHECK(memory.live > 0);
  fiw_workspace_free(ws);
  CHECK(memory.live == 0);

  memory.refuse = 1;
  const fiw_status created = fiw_workspace_create_with_options(-1, &options, &ws, &err);
  if (created == FIW_OK) CHECK(call_once(ws, &p, &p.lse.dl, &err) == FIW_OUT_OF_MEMORY);
  CHECK(err.code == FIW_OUT_OF_MEMORY && err.reason == FIW_REASON_ALLOCATION && err.bytes_required > 0);
  fiw_workspace_free(ws);
  CHECK(memory.live == 0);
  destroy(&p);
}

static void test_closed(void) {
  static problem p;
  build(&p, &kScenarios[0]);
  fiw_workspace* ws = new_workspace();
  fiw_step* step = NULL;
  fiw_step* late = (fiw_step*)&p;
  fiw_error err = new_error();
  const fiw_step_spec spec = spec_of(&p);
  CHECK_OK(plan(ws, &p, &spec, &step, &err), err);
  fiw_graph* graph = new_graph(ws, &p, NULL, 1);
  fiw_graph* late_graph = (fiw_graph*)&p;
  fiw_workspace_close(ws);
#define CHECK_CLOSED(call) CHECK_FAILS(call, err, FIW_CLOSED, FIW_REASON_CLOSED_WORKSPACE, "closed")
  CHECK_CLOSED(call_once(ws, &p, NULL, &err));
  CHECK_CLOSED(
      fiw_prefill(ws, &p.q.dl, &p.qo_indptr_t.dl, &p.cache, p.table, &p.params, &p.out.dl, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_verify(ws, &p.q.dl, 1, &p.cache, p.table, &p.params, &p.out.dl, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_append_kv(ws, &p.q.dl, &p.q.dl, &p.qo_indptr_t.dl, &p.cache, p.table, NULL, &err));
  CHECK_CLOSED(fiw_plan_decode(ws, p.table, &spec, &late, &err));
  CHECK(late == NULL);
  CHECK_CLOSED(fiw_step_run(step, &p.q.dl, &p.cache, &p.out.dl, NULL, &p.extras, NULL, &err));
  /* Closed is said before any other argument is judged. */
  CHECK_CLOSED(fiw_decode(ws, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_prefill(ws, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_verify(ws, NULL, -1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_ragged_prefill(ws, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_append_kv(ws, NULL, NULL, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_merge_states(ws, NULL, NULL, 0, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_page_table_from_device(ws, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_plan_decode(ws, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_plan_prefill(ws, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_plan_verify(ws, -1, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_step_run(step, NULL, NULL, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_graph_create(ws, NULL, &late_graph, &err));
  CHECK(late_graph == NULL);
  CHECK_CLOSED(fiw_graph_capture(graph, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_graph_begin(graph, -1, NULL, NULL, &err));
  CHECK_CLOSED(fiw_graph_run(graph, -1, NULL, NULL, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_graph_append_kv(graph, NULL, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_graph_prepare(graph, NULL, NULL, NULL, &err));
  CHECK_CLOSED(fiw_graph_step(graph, NULL, NULL, &err));
  CHECK_CLOSED(fiw_graph_replay(graph, -1, NULL, &err));
  CHECK_CLOSED(fiw_graph_check(graph, NULL, &err));
  CHECK(fiw_graph_num_buckets(graph) == 3);
  CHECK_OK(fiw_workspace_invalidate_runtime_cache(ws, &err), err);
  CHECK_OK(fiw_workspace_invalidate_prefill_runtime_cache(ws, &err), err);
  CHECK_OK(fiw_workspace_invalidate_verify_runtime_cache(ws, &err), err);
  fiw_workspace_free(ws);
  CHECK_CLOSED(fiw_step_run(step, &p.q.dl, &p.cache, &p.out.dl, NULL, &p.extras, NULL, &err));
  CHECK_CLOSED(fiw_graph_step(graph, p.table, NULL, &err));
#undef CHECK_CLOSED
  fiw_graph_free(graph);
  fiw_step_free(step);
  fiw_step_free(NULL);
  destroy(&p);
}

static void test_stats_and_invalidation(void) {
  static problem decode, prefill, verify;
  build(&decode, &kScenarios[0]);
  build(&prefill, &kScenarios[5]);
  build(&verify, &kScenarios[8]);
  fiw_workspace* ws = new_workspace();
  fiw_error err = new_error();
  fiw_workspace_stats stats = FIW_WORKSPACE_STATS_INIT;
  for (int i = 0; i < 2; ++i) {
    CHECK_OK(call_once(ws, &decode, NULL, &err), err);
    CHECK_OK(call_once(ws, &prefill, NULL, &err), err);
    CHECK_OK(call_once(ws, &verify, NULL, &err), err);
  }
  CHECK_OK(fiw_workspace_get_stats(ws, &stats, &err), err);
  CHECK(stats.decode.hits == 1 && stats.decode.misses == 1 && stats.decode.entries == 1 && stats.decode.bytes > 0);
  CHECK(stats.prefill.hits == 1 && stats.prefill.misses == 1 && stats.prefill.entries == 1);
  CHECK(stats.verify.hits == 1 && stats.verify.misses == 1 && stats.verify.entries == 1);
  CHECK(stats.int_scratch_bytes > 0 && stats.plan_nanoseconds > 0 && stats.run_nanoseconds > 0);
  CHECK_OK(fiw_workspace_invalidate_verify_runtime_cache(ws, &err), err);
  CHECK_OK(fiw_workspace_get_stats(ws, &stats, &err), err);
  CHECK(stats.verify.entries == 0 && stats.verify.invalidations == 1 && stats.decode.entries == 1 &&
        stats.prefill.entries == 1);
  CHECK_OK(call_once(ws, &verify, NULL, &err), err);
  CHECK_OK(fiw_workspace_invalidate_prefill_runtime_cache(ws, &err), err);
  CHECK_OK(fiw_workspace_get_stats(ws, &stats, &err), err);
  CHECK(stats.prefill.entries == 0 && stats.decode.entries == 1 && stats.verify.entries == 1);
  CHECK_OK(call_once(ws, &prefill, NULL, &err), err);
  CHECK_OK(fiw_workspace_invalidate_runtime_cache(ws, &err), err);
  CHECK_OK(fiw_workspace_get_stats(ws, &stats, &err), err);
  CHECK(stats.decode.entries == 0 && stats.prefill.entries == 0 && stats.verify.entries == 1);
  stats.struct_size -= 8;
  CHECK_FAILS(fiw_workspace_get_stats(ws, &stats, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_STRUCT_SIZE,
              "stats.struct_size");
  CHECK_FAILS(fiw_workspace_get_stats(ws, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS, "stats is null");
  CHECK_FAILS(fiw_workspace_get_stats(NULL, &stats, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS, "ws is null");
  fiw_workspace_free(ws);
  destroy(&decode), destroy(&prefill), destroy(&verify);
}

static void test_sizes(void) {
  fiw_error err = new_error();
  fiw_device_props device = FIW_DEVICE_PROPS_INIT;
  fiw_attention_params params = new_params(32, 8, 128);
  fiw_workspace_limits limits = FIW_WORKSPACE_LIMITS_INIT;
  limits.params = &params;
  limits.max_batch = 64;
  limits.max_kv_len = 4096;
  size_t bytes = 0, more = 0;
  CHECK_OK(fiw_device_props_h200(&device, &err), err);
  CHECK(device.kind == FIW_DEVICE_CUDA && device.compute_capability == 90 && device.num_workers == 132);
  CHECK_OK(fiw_required_workspace(&device, &limits, NULL, &bytes, &err), err);
  CHECK(bytes > 0);
  CHECK_OK(fiw_device_props_cpu(2, &device, &err), err);
  CHECK(device.kind == FIW_DEVICE_CPU && device.num_workers == 2);
  CHECK_OK(fiw_required_workspace(&device, &limits, NULL, &bytes, &err), err);
  fiw_plan_options plan_options = FIW_PLAN_OPTIONS_INIT;
  plan_options.batch_invariant = 1;
  plan_options.fixed_split_tokens = 64;
  CHECK_OK(fiw_required_workspace(&device, &limits, &plan_options, &more, &err), err);
  CHECK(more > bytes); /* many more splits */
  for (int32_t tokens = 0; tokens >= -1; --tokens) {
    plan_options.fixed_split_tokens = tokens;
    CHECK_FAILS(fiw_required_workspace(&device, &limits, &plan_options, &more, &err), err, FIW_INVALID_ARGUMENT,
                FIW_REASON_OPTIONS, tokens == 0 ? "fixed_split_tokens is 0" : "fixed_split_tokens is -1");
  }
  plan_options.fixed_split_tokens = 1;
  fiw_workspace_limits absurd = limits;
  fiw_attention_params wide = new_params(INT32_MAX, INT32_MAX, 576);
  absurd.params = &wide;
  absurd.max_batch = absurd.max_total_qo = absurd.max_kv_len = INT32_MAX;
  absurd.page_size = 1;
  more = 17;
  CHECK_FAILS(fiw_required_workspace(&device, &absurd, &plan_options, &more, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_SIZE_OVERFLOW, "more bytes than int64 holds");
  CHECK(more == 17);

  CHECK_FAILS(fiw_device_props_cpu(0, &device, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS, "threads is 0");
  CHECK_FAILS(fiw_device_props_h200(NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS, "props is null");
  CHECK_FAILS(fiw_required_workspace(NULL, &limits, NULL, &bytes, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "device is null");
  CHECK_FAILS(fiw_required_workspace(&device, NULL, NULL, &bytes, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "limits is null");
  CHECK_FAILS(fiw_required_workspace(&device, &limits, NULL, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "bytes is null");
  device.kind = 2;
  CHECK_FAILS(fiw_required_workspace(&device, &limits, NULL, &bytes, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_OPTIONS, "device.kind is 2");
  device.kind = FIW_DEVICE_CPU;
  device.num_workers = 0;
  CHECK_FAILS(fiw_required_workspace(&device, &limits, NULL, &bytes, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_OPTIONS, "device.num_workers is 0");
  device.num_workers = 1;
  params.num_kv_heads = 5;
  CHECK_FAILS(fiw_required_workspace(&device, &limits, NULL, &bytes, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_HEAD_COUNT, "num_qo_heads is 32");
}

/* A workspace of a fixed size that is too small says how many bytes would do, and they do. */
static void test_fixed_size(void) {
  static const scenario s = {.name = "fixed size",
                             .kind = DECODE,
                             .num_qo_heads = 8,
                             .num_kv_heads = 2,
                             .head_dim_qk = 64,
                             .page_size = 16,
                             .batch = 2,
                             .kv_len = {2000, 500},
                             .qo_len = {1, 1},
                             .q_format = &kF32,
                             .kv_format = &kF32,
                             PLAIN};
  static problem p;
  build(&p, &s);
  fiw_plan_options plan_options = FIW_PLAN_OPTIONS_INIT;
  plan_options.batch_invariant = 1;
  plan_options.fixed_split_tokens = 64;
  fiw_workspace_options options = FIW_WORKSPACE_OPTIONS_INIT;
  options.plan = &plan_options;
  options.fixed_size = 1;
  options.workspace_bytes = 64;
  fiw_workspace* ws = NULL;
  fiw_error err = new_error();
  CHECK_OK(fiw_workspace_create_with_options(-1, &options, &ws, &err), err);
  CHECK_FAILS(call_once(ws, &p, &p.lse.dl, &err), err, FIW_WORKSPACE_TOO_SMALL, FIW_REASON_SCRATCH_TOO_SMALL, "");
  CHECK(err.bytes_required > 64);
  options.workspace_bytes = (size_t)err.bytes_required;
  fiw_workspace_free(ws);
  CHECK_OK(fiw_workspace_create_with_options(-1, &options, &ws, &err), err);
  CHECK_OK(call_once(ws, &p, &p.lse.dl, &err), err);
  check_results(&p, "a workspace of exactly the bytes needed", 1);
  fiw_workspace_free(ws);
  destroy(&p);
}

/* ---- page tables
 * ----------------------------------------------------------------------------------------------------------- */

static int same(const int32_t* a, const int32_t* b, int n) { return memcmp(a, b, (size_t)n * sizeof *a) == 0; }

static void test_page_table(void) {
  const int32_t indptr[3] = {0, 2, 3}, indices[3] = {7, 1, 4}, last[2] = {3, 16}, lens[2] = {19, 16},
                counts[2] = {2, 1};
  const int32_t blocks_in[2][4] = {{7, 1, -5, 99}, {4, -5, 99, -5}};
  tensor a, b, c, d;
  fiw_error err = new_error();
  fiw_page_table *csr = NULL, *pages = NULL, *blocks = NULL, *copy = NULL;
  CHECK_OK(
      fiw_page_table_from_csr(16, 10, ints(&a, indptr, 3), ints(&b, indices, 3), ints(&c, last, 2), NULL, &csr, &err),
      err);
  CHECK_OK(
      fiw_page_table_from_pages(16, 10, ints(&a, indices, 3), ints(&b, counts, 2), ints(&c, lens, 2), &pages, &err),
      err);
  union {
    const int32_t (*from)[4];
    void* to;
  } block_data;
  block_data.from = blocks_in;
  make2(&d, block_data.to, kI32, 2, 3);
  d.strides[0] = 4, d.strides[1] = 1; /* rows of four, of which three belong to the table */
  d.dl.strides = d.strides;
  CHECK_OK(fiw_page_table_from_block_table(16, 10, &d.dl, ints(&c, lens, 2), &blocks, &err), err);
  CHECK(fiw_page_table_equal(csr, pages) && fiw_page_table_equal(csr, blocks) && fiw_page_table_equal(pages, blocks));
  CHECK(fiw_page_table_equal(NULL, NULL) && !fiw_page_table_equal(csr, NULL) && !fiw_page_table_equal(NULL, csr));
  CHECK(fiw_page_table_batch(csr) == 2 && fiw_page_table_page_size(csr) == 16 && fiw_page_table_num_pages(csr) == 10);
  CHECK(fiw_page_table_total_kv(csr) == 35 && fiw_page_table_max_kv_len(csr) == 19);
  CHECK(same(fiw_page_table_indptr(csr), indptr, 3) && same(fiw_page_table_indices(csr), indices, 3));
  CHECK(same(fiw_page_table_last_page_len(csr), last, 2) && same(fiw_page_table_kv_lens(csr), lens, 2));
  CHECK(same(fiw_page_table_page_counts(csr), counts, 2));

  int32_t blocks_out[2][4], lens_out[2] = {0, 0};
  const int32_t padded[2][4] = {{7, 1, -1, 55}, {4, -1, -1, 55}};
  for (int i = 0; i < 8; ++i) blocks_out[i / 4][i % 4] = 55;
  d.dl.data = blocks_out;
  CHECK_OK(fiw_page_table_to_block_table(csr, -1, &d.dl, ints(&c, lens_out, 2), &err), err);
  CHECK(memcmp(blocks_out, padded, sizeof padded) == 0 && same(lens_out, lens, 2));
  CHECK_OK(fiw_page_table_to_block_table(csr, -1, &d.dl, NULL, &err), err);
  make2(&d, blocks_out, kI32, 2, 3);
  CHECK_FAILS(fiw_page_table_to_block_table(csr, -1, &d.dl, ints(&c, blocks_out[1], 2), &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_TENSOR_OVERLAP, "kv_lens overlaps blocks");
  make2(&d, blocks_out, kI32, 2, 1);
  CHECK_FAILS(fiw_page_table_to_block_table(csr, -1, &d.dl, NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_SHAPE, "blocks: shape [2, 1], expected [2, at least 2]");
  make2(&d, blocks_out, kI32, 2, 3);
  CHECK_FAILS(fiw_page_table_to_block_table(csr, -1, &d.dl, ints(&c, lens_out, 1), &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_SHAPE, "kv_lens: shape [1]");
  d.strides[0] = 2, d.strides[1] = 1;
  d.dl.strides = d.strides;
  CHECK_FAILS(fiw_page_table_to_block_table(csr, -1, &d.dl, NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_STRIDE, "blocks");

  /* Pages reserved ahead are ignored; padding is not read, and need not exist behind the last row. */
  const int32_t ahead[5] = {7, 1, -9, 4, 99}, ahead_counts[2] = {3, 2};
  fiw_page_table* reserved = NULL;
  CHECK_OK(fiw_page_table_from_pages(16, 10, ints(&a, ahead, 5), ints(&b, ahead_counts, 2), ints(&c, lens, 2),
                                     &reserved, &err),
           err);
  CHECK(fiw_page_table_equal(csr, reserved));
  fiw_page_table_free(reserved);
  int32_t* exact = malloc(5 * sizeof *exact);
  const int32_t rows_of_four[5] = {7, 1, -5, 99, 4};
  memcpy(exact, rows_of_four, sizeof rows_of_four);
  make2(&d, exact, kI32, 2, 4);
  CHECK_OK(fiw_page_table_from_block_table(16, 10, &d.dl, ints(&c, lens, 2), &reserved, &err), err);
  CHECK(fiw_page_table_equal(csr, reserved));
  fiw_page_table_free(reserved);
  free(exact);
  make2(&d, blocks_out, kI32, 2, 3);
  for (int32_t size = 0; size >= -1; --size) {
    CHECK_FAILS(fiw_page_table_from_block_table(size, 10, &d.dl, &c.dl, &reserved, &err), err, FIW_INVALID_ARGUMENT,
                FIW_REASON_PAGE_SIZE, "page_size is");
  }
  const int32_t too_long[2] = {64, INT32_MAX}, below_zero[2] = {3, -1};
  CHECK_FAILS(fiw_page_table_from_block_table(16, 10, &d.dl, ints(&c, too_long, 2), &reserved, &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_KV_LENS, "request 0 has 3 pages");
  CHECK_FAILS(fiw_page_table_from_block_table(16, 100, &d.dl, ints(&c, below_zero, 2), &reserved, &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_KV_LENS, "kv_lens[1] is -1");

  /* Advancing one handle leaves its copy alone. */
  CHECK_OK(fiw_page_table_copy(csr, &copy, &err), err);
  CHECK(fiw_page_table_pages_needed(copy, 1) == 1 && fiw_page_table_pages_needed(copy, 14) == 2);
  const int32_t gained[2] = {9, 3}, grown_lens[2] = {33, 30}, each[2] = {1, 0}, each_lens[2] = {34, 30};
  CHECK_FAILS(fiw_page_table_advance(copy, 14, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_NEW_PAGES, "");
  CHECK(fiw_page_table_equal(copy, csr));
  CHECK_OK(fiw_page_table_advance(copy, 14, ints(&a, gained, 2), &err), err);
  CHECK(same(fiw_page_table_kv_lens(copy), grown_lens, 2) && same(fiw_page_table_kv_lens(csr), lens, 2));
  CHECK_OK(fiw_page_table_advance_each(copy, ints(&a, each, 2), NULL, &err), err);
  CHECK(same(fiw_page_table_kv_lens(copy), each_lens, 2));
  CHECK_FAILS(fiw_page_table_advance_each(copy, ints(&a, each, 1), NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_BATCH, "tokens");
  CHECK_FAILS(fiw_page_table_advance(NULL, 1, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_TABLE_NULL,
              "table is null");
  CHECK_FAILS(fiw_page_table_advance_each(NULL, &a.dl, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_TABLE_NULL,
              "table is null");
  fiw_page_table_free(copy);
  copy = csr;
  CHECK_FAILS(fiw_page_table_copy(NULL, &copy, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_TABLE_NULL,
              "table is null");
  CHECK(copy == NULL);

  CHECK(fiw_page_table_pages_needed(NULL, 1) == 0 && fiw_page_table_batch(NULL) == 0 &&
        fiw_page_table_page_size(NULL) == 0);
  CHECK(fiw_page_table_num_pages(NULL) == 0 && fiw_page_table_total_kv(NULL) == 0 &&
        fiw_page_table_max_kv_len(NULL) == 0);
  CHECK(!fiw_page_table_indptr(NULL) && !fiw_page_table_indices(NULL) && !fiw_page_table_last_page_len(NULL));
  CHECK(!fiw_page_table_page_counts(NULL) && !fiw_page_table_kv_lens(NULL));

  /* Requests without pages need no column. */
  const int32_t no_pages[3] = {0, 0, 0};
  CHECK_OK(fiw_page_table_from_csr(16, 0, ints(&a, no_pages, 3), ints(&b, NULL, 0), ints(&c, no_pages, 2), NULL, &copy,
                                   &err),
           err);
  CHECK_OK(fiw_page_table_to_block_table(copy, -1, make2(&d, NULL, kI32, 2, 0), ints(&c, lens_out, 2), &err), err);
  CHECK(fiw_page_table_batch(copy) == 2 && same(lens_out, no_pages, 2));
  fiw_page_table_free(copy);
  CHECK_OK(fiw_page_table_from_block_table(16, 0, &d.dl, &c.dl, &copy, &err), err);
  CHECK(fiw_page_table_batch(copy) == 2 && fiw_page_table_total_kv(copy) == 0);
  fiw_page_table_free(copy);
  fiw_page_table_free(csr), fiw_page_table_free(pages), fiw_page_table_free(blocks), fiw_page_table_free(NULL);
}

/* On the CPU a device's memory is the host's. */
static void test_device_table(void) {
  int32_t indptr[3] = {0, 2, 3}, indices[4] = {7, 1, 4, -1}, last[2] = {3, 16};
  tensor a, b, c;
  fiw_error err = new_error();
  fiw_workspace* ws = new_workspace();
  fiw_page_table *host = NULL, *first = NULL, *second = NULL, *none = (fiw_page_table*)&err;
  CHECK_OK(
      fiw_page_table_from_csr(16, 10, ints(&a, indptr, 3), ints(&b, indices, 3), ints(&c, last, 2), NULL, &host, &err),
      err);
  fiw_device_page_table device = FIW_DEVICE_PAGE_TABLE_INIT;
  device.page_size = 16;
  device.num_pages = 10;
  device.indptr = &a.dl;
  device.indices = ints(&b, indices, 4); /* one more than are used */
  device.last_page_len = &c.dl;
  device.version = 1;
  CHECK_OK(fiw_page_table_from_device(ws, &device, &first, NULL, &err), err);
  CHECK(fiw_page_table_equal(first, host));
  indices[2] = 5; /* against the version's promise, so that a copy would show */
  CHECK_OK(fiw_page_table_from_device(ws, &device, &second, NULL, &err), err);
  CHECK(fiw_page_table_equal(second, host));
  fiw_page_table_free(second);
  device.version = 0;
  CHECK_OK(fiw_page_table_from_device(ws, &device, &second, NULL, &err), err);
  CHECK(!fiw_page_table_equal(second, host) && fiw_page_table_indices(second)[2] == 5);
  fiw_workspace_stats stats = FIW_WORKSPACE_STATS_INIT;
  CHECK_OK(fiw_workspace_get_stats(ws, &stats, &err), err);
  CHECK(stats.tables_known == 1 && stats.tables_copied == 2);

#define CHECK_DEVICE_TABLE_FAILS(why, text)                                                                      \
  CHECK_FAILS(fiw_page_table_from_device(ws, &device, &none, NULL, &err), err, FIW_INVALID_ARGUMENT, why, text); \
  CHECK(none == NULL)
  indices[2] = 10;
  CHECK_DEVICE_TABLE_FAILS(FIW_REASON_PAGE_INDEX, "request 1 uses page 10");
  CHECK(err.index == 1);
  indices[2] = 4;
  device.page_size = 0;
  CHECK_DEVICE_TABLE_FAILS(FIW_REASON_PAGE_SIZE, "page_size is 0");
  device.page_size = 16;
  c.dl.device.device_type = kDLCUDA;
  CHECK_DEVICE_TABLE_FAILS(FIW_REASON_TENSOR_DEVICE,
                           "table.last_page_len is on CUDA device 0, expected the CPU, as the workspace");
  c.dl.device.device_type = kDLCPU;
  c.dl.dtype = kI64;
  CHECK_DEVICE_TABLE_FAILS(FIW_REASON_INDEX_TYPE, "table.last_page_len: int64, expected int32");
  c.dl.dtype = kI32;
  device.indices = NULL;
  CHECK_DEVICE_TABLE_FAILS(FIW_REASON_TENSOR_NULL, "table.indices is null");
  device.indices = &b.dl;
  device.reserved = 1;
  CHECK_DEVICE_TABLE_FAILS(FIW_REASON_OPTIONS, "table.reserved is 1");
  device.reserved = 0;
  device.struct_size = 1;
  CHECK_DEVICE_TABLE_FAILS(FIW_REASON_STRUCT_SIZE, "table.struct_size is 1");
#undef CHECK_DEVICE_TABLE_FAILS
  fiw_page_table_free(second);
  fiw_page_table_free(first);
  fiw_page_table_free(host);
  fiw_workspace_free(ws);
}

static void test_bad_tables(void) {
  static const struct {
    int32_t page_size, indptr[3], indptr_length, indices[3], indices_length, last[2], kv_lens[2];
    fiw_reason reason;
    int64_t request;
    const char* text;
  } faults[] = {
      {16, {0, 2, 3}, 3, {7, 1, 4}, 3, {0, 16}, {-1, 0}, FIW_REASON_LAST_PAGE_LEN, 0, "request 0"},
      {16, {0, 2, 3}, 3, {7, 1, 4}, 3, {3, 17}, {-1, 0}, FIW_REASON_LAST_PAGE_LEN, 1, "17"},
      {16, {0, 2, 1}, 3, {7, 1, 4}, 3, {3, 16}, {-1, 0}, FIW_REASON_INDPTR_DECREASING, 1, "indptr[2] is 1"},
      {16, {1, 2, 3}, 3, {7, 1, 4}, 3, {3, 16}, {-1, 0}, FIW_REASON_INDPTR_START, -1, "indptr[0] is 1"},
      {16, {0, 2, 3}, 2, {7, 1, 4}, 3, {3, 16}, {-1, 0}, FIW_REASON_INDPTR_LENGTH, -1, "indptr"},
      {16, {0, 2, 3}, 3, {7, 1, 4}, 2, {3, 16}, {-1, 0}, FIW_REASON_INDICES_LENGTH, -1, "indices"},
      {16, {0, 2, 3}, 3, {7, 1, 10}, 3, {3, 16}, {-1, 0}, FIW_REASON_PAGE_INDEX, 1, "page 10"},
      {16, {0, 2, 3}, 3, {7, -1, 4}, 3, {3, 16}, {-1, 0}, FIW_REASON_PAGE_INDEX, 0, "page -1"},
      {16, {0, 2, 3}, 3, {7, 1, 4}, 3, {3, 16}, {19, 15}, FIW_REASON_KV_LENS, 1, "16"},
      {0, {0, 2, 3}, 3, {7, 1, 4}, 3, {3, 16}, {-1, 0}, FIW_REASON_PAGE_SIZE, -1, "page_size is 0"},
  };
  tensor a, b, c, d;
  fiw_error err = new_error();
  for (int i = 0; i < COUNT(faults); ++i) {
    fiw_page_table* table = (fiw_page_table*)&err;
    const DLTensor* kv_lens = faults[i].kv_lens[0] < 0 ? NULL : ints(&d, faults[i].kv_lens, 2);
    CHECK_FAILS(fiw_page_table_from_csr(faults[i].page_size, 10, ints(&a, faults[i].indptr, faults[i].indptr_length),
                                        ints(&b, faults[i].indices, faults[i].indices_length),
                                        ints(&c, faults[i].last, 2), kv_lens, &table, &err),
                err, FIW_INVALID_ARGUMENT, faults[i].reason, faults[i].text);
    CHECK(table == NULL && err.index == faults[i].request);
  }

  const int32_t indptr[3] = {0, 2, 3}, indices[3] = {7, 1, 4}, last[2] = {3, 16}, lens[2] = {19, 16};
  int64_t wide[3] = {0, 2, 3};
  fiw_page_table* table = NULL;
#define CHECK_TABLE_FAILS(why, text)                                                                               \
  CHECK_FAILS(fiw_page_table_from_csr(16, 10, &a.dl, &b.dl, &c.dl, NULL, &table, &err), err, FIW_INVALID_ARGUMENT, \
              why, text)
  ints(&b, indices, 3), ints(&c, last, 2);
  make1(&a, wide, kI64, 3);
  CHECK_TABLE_FAILS(FIW_REASON_INDEX_TYPE, "indptr: int64, expected int32");
  make1(&a, wide, kFloat, 3);
  CHECK_TABLE_FAILS(FIW_REASON_INDEX_TYPE, "indptr: dtype {code 2, bits 32, lanes 1}, expected int32");
  make2(&a, wide, kI32, 3, 1);
  CHECK_TABLE_FAILS(FIW_REASON_TENSOR_RANK, "indptr: rank 2, expected 1");
  ints(&a, indptr, 3);
  a.dl.device.device_type = kDLCUDA;
  CHECK_TABLE_FAILS(FIW_REASON_TENSOR_DEVICE, "indptr is on CUDA device 0, expected the CPU");
  a.dl.device.device_type = kDLMetal;
  CHECK_TABLE_FAILS(FIW_REASON_TENSOR_DEVICE, "indptr: device {type 8, id 0}");
  ints(&a, indptr, 3);
  a.strides[0] = 2;
  a.dl.strides = a.strides;
  CHECK_TABLE_FAILS(FIW_REASON_TENSOR_STRIDE, "indptr: the stride of its last axis is 2, expected 1");
  ints(&a, indptr, 3);
  b.dl.data = NULL;
  CHECK_TABLE_FAILS(FIW_REASON_TENSOR_NULL, "indices: data is null, expected [3] elements");
#undef CHECK_TABLE_FAILS
  ints(&b, indices, 3);
  CHECK_FAILS(fiw_page_table_from_csr(16, 10, NULL, &b.dl, &c.dl, NULL, &table, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_NULL, "indptr is null");
  CHECK_FAILS(fiw_page_table_from_csr(16, 10, &a.dl, &b.dl, &c.dl, ints(&d, lens, 0), &table, &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_KV_LENS, "kv_lens has 0 entries");
  CHECK_FAILS(fiw_page_table_from_csr(16, 10, &a.dl, &b.dl, &c.dl, NULL, NULL, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_OPTIONS, "out is null");

  const int32_t counts[2] = {2, 2}, negative[2] = {-1, 4}, few[2] = {1, 1};
  CHECK_FAILS(fiw_page_table_from_pages(16, -1, ints(&a, NULL, 0), ints(&b, NULL, 0), ints(&c, NULL, 0), &table, &err),
              err, FIW_INVALID_ARGUMENT, FIW_REASON_TABLE_SIZE, "num_pages is -1");
  CHECK_FAILS(
      fiw_page_table_from_pages(16, 10, ints(&a, indices, 3), ints(&b, counts, 2), ints(&c, lens, 2), &table, &err),
      err, FIW_INVALID_ARGUMENT, FIW_REASON_INDICES_LENGTH, "request 1: page_counts is 2, but only 1");
  CHECK_FAILS(fiw_page_table_from_pages(16, 10, &a.dl, ints(&b, negative, 2), &c.dl, &table, &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_INDICES_LENGTH, "request 0: page_counts is -1");
  CHECK_FAILS(fiw_page_table_from_pages(16, 10, &a.dl, ints(&b, few, 2), &c.dl, &table, &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_INDICES_LENGTH, "pages has 3 entries, page_counts adds up to 2");
  make2(&d, wide, kI32, 2, 2);
  CHECK_FAILS(fiw_page_table_from_block_table(16, 10, &d.dl, ints(&c, lens, 1), &table, &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_BATCH, "kv_lens has 1 entries, expected 2");
}

/* ---- bad tensors, structs and steps
 * ---------------------------------------------------------------------------------------- */

static fiw_workspace_stats stats_of(const fiw_workspace* ws) {
  fiw_workspace_stats stats = FIW_WORKSPACE_STATS_INIT;
  fiw_error err = new_error();
  CHECK_OK(fiw_workspace_get_stats(ws, &stats, &err), err);
  return stats;
}

/* A number that the caller's header did not name, put where an enumeration is. */
static DLDeviceType device_type_of(int32_t number) {
  DLDeviceType type;
  memcpy(&type, &number, sizeof type);
  return type;
}

/* One good call, spoiled in one place at a time; after each fault the call must still work. */
static void test_bad_arguments(void) {
  static problem p;
  static const scenario s = {.name = "good call",
                             .kind = DECODE,
                             .num_qo_heads = 8,
                             .num_kv_heads = 2,
                             .head_dim_qk = 64,
                             .page_size = 16,
                             .batch = 2,
                             .kv_len = {33, 9},
                             .qo_len = {1, 1},
                             .q_format = &kF32,
                             .kv_format = &kF32,
                             PLAIN};
  build(&p, &s);
  fiw_workspace* ws = new_workspace();
  fiw_error err = new_error();
  fiw_step* step = NULL;
  const fiw_step_spec spec = spec_of(&p);
  CHECK_OK(plan(ws, &p, &spec, &step, &err), err);

#define CHECK_CALL_FAILS(why, text)                                                        \
  do {                                                                                     \
    const fiw_workspace_stats before_ = stats_of(ws);                                      \
    poison_results(&p);                                                                    \
    CHECK_FAILS(call_once(ws, &p, &p.lse.dl, &err), err, FIW_INVALID_ARGUMENT, why, text); \
    CHECK(load_bits(&kF32, p.out_memory, 0) == 0xFFFFFFFFu);                               \
    const fiw_workspace_stats after_ = stats_of(ws);                                       \
    CHECK(memcmp(&before_, &after_, sizeof before_) == 0);                                 \
  } while (0)
#define WITH(lvalue, value, why, text) \
  do {                                 \
    const problem good_ = p;           \
    lvalue = value;                    \
    CHECK_CALL_FAILS(why, text);       \
    p = good_;                         \
  } while (0)
#define WITH_BOTH(first, first_value, second, second_value, why, text) \
  do {                                                                 \
    const problem good_ = p;                                           \
    first = first_value;                                               \
    second = second_value;                                             \
    CHECK_CALL_FAILS(why, text);                                       \
    p = good_;                                                         \
  } while (0)

  /* rank, shape, strides */
  WITH(p.q.dl.ndim, 2, FIW_REASON_TENSOR_RANK, "q: rank 2, expected 3 [rows, heads, dim]");
  WITH(p.q.dl.shape, NULL, FIW_REASON_TENSOR_SHAPE, "q: shape is null");
  WITH(p.q.shape[0], -1, FIW_REASON_TENSOR_SHAPE, "q: axis 0 has -1 entries");
  WITH(p.q.shape[0], 3, FIW_REASON_TENSOR_SHAPE, "q has 3 rows, expected 2");
  WITH(p.out.shape[1], 7, FIW_REASON_TENSOR_SHAPE, "out has 7 heads, expected 8");
  WITH_BOTH(p.q.dl.strides, p.q.strides, p.q.strides[2], 2, FIW_REASON_TENSOR_STRIDE,
            "q: the stride of its last axis is 2");
  WITH_BOTH(p.out.dl.strides, p.out.strides, p.out.strides[2], 1, FIW_REASON_TENSOR_STRIDE,
            "out: the stride of axis 1 is 0");
  WITH(p.q.shape[0], INT64_MAX / 2, FIW_REASON_SIZE_OVERFLOW, "q: shape, strides or byte_offset");
  WITH(p.q.dl.byte_offset, UINT64_MAX, FIW_REASON_SIZE_OVERFLOW, "q: shape, strides or byte_offset");
  /* dtype: code, bits, lanes */
  WITH(p.q.dl.dtype.code, kDLInt, FIW_REASON_TENSOR_DTYPE, "q: dtype {code 0, bits 32, lanes 1}");
  WITH(p.q.dl.dtype.bits, 64, FIW_REASON_TENSOR_DTYPE, "q: dtype {code 2, bits 64, lanes 1}");
  WITH(p.q.dl.dtype.lanes, 4, FIW_REASON_TENSOR_DTYPE, "q: dtype {code 2, bits 32, lanes 4}");
  WITH(p.out.dl.dtype, kBf16.dtype, FIW_REASON_TENSOR_DTYPE, "out is bfloat16, expected float32");
  /* device, null, alignment, overlap */
  WITH(p.q.dl.device.device_type, kDLCUDA, FIW_REASON_TENSOR_DEVICE, "CUDA device 0");
  WITH_BOTH(p.q.dl.device.device_type, kDLCUDA, p.q.dl.device.device_id, -1, FIW_REASON_TENSOR_DEVICE,
            "q: device {type 2, id -1}");
  WITH(p.out.dl.device.device_type, kDLCUDA, FIW_REASON_TENSOR_DEVICE, "out is on CUDA device 0");
  WITH(p.q.dl.data, NULL, FIW_REASON_TENSOR_NULL, "q: data is null, expected [2, 8, 64] elements");
  WITH(p.q.dl.byte_offset, 2, FIW_REASON_TENSOR_ALIGNMENT, "q: data + byte_offset");
  WITH(p.out.dl.data, p.q.dl.data, FIW_REASON_TENSOR_OVERLAP, "out overlaps q");
  WITH(p.q.dl.device.device_type, device_type_of(999), FIW_REASON_TENSOR_DEVICE, "q: device {type 999, id 0}");
  WITH(p.q.dl.device.device_type, device_type_of(-1), FIW_REASON_TENSOR_DEVICE, "q: device {type -1, id 0}");
  WITH(p.out.dl.data, p.k.dl.data, FIW_REASON_TENSOR_OVERLAP, "out overlaps kv.k");
  WITH(p.out.dl.data, p.v.dl.data, FIW_REASON_TENSOR_OVERLAP, "out overlaps kv.v");
  WITH(p.lse.dl.data, p.q.dl.data, FIW_REASON_TENSOR_OVERLAP, "lse overlaps q");
  WITH(p.lse.dl.data, p.out.dl.data, FIW_REASON_TENSOR_OVERLAP, "lse overlaps out");
  WITH(p.lse.dl.data, p.v.dl.data, FIW_REASON_TENSOR_OVERLAP, "lse overlaps kv.v");
  {
    const problem good = p;
    p.out.dl.strides = p.out.strides;
    p.out.strides[0] = 511, p.out.strides[1] = 64, p.out.strides[2] = 1;
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_STRIDE,
                     "out: the stride of its row axis is 511 elements, expected at least 512");
    p = good;
  }
  /* LSE */
  WITH(p.lse.dl.ndim, 1, FIW_REASON_TENSOR_RANK, "lse: rank 1, expected 2 [2, 8]");
  WITH(p.lse.shape[1], 4, FIW_REASON_TENSOR_SHAPE, "lse: shape [2, 4], expected [2, 8]");
  WITH(p.lse.dl.dtype, kF16.dtype, FIW_REASON_TENSOR_DTYPE, "lse: dtype {code 2, bits 16, lanes 1}, expected float32");
  WITH(p.lse.dl.device.device_type, kDLCUDA, FIW_REASON_TENSOR_DEVICE,
       "lse is on CUDA device 0, expected the CPU, as q");
  {
    const problem good = p;
    p.lse.dl.strides = p.lse.strides;
    p.lse.strides[0] = 16, p.lse.strides[1] = 1;
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_STRIDE, "lse: the stride of its rows is 16, expected 8 (compact)");
    p = good;
  }
  /* cache */
  WITH(p.cache.k, NULL, FIW_REASON_TENSOR_NULL, "kv.k is null");
  WITH(p.cache.v, NULL, FIW_REASON_TENSOR_NULL, "kv.v is null");
  WITH(p.cache.kv, &p.k.dl, FIW_REASON_OPTIONS, "kv.kv is given beside");
  WITH(p.cache.layout, 2, FIW_REASON_OPTIONS, "kv.layout is 2");
  WITH(p.cache.reserved, 1, FIW_REASON_OPTIONS, "kv.reserved is 1");
  WITH(p.cache.struct_size, 0, FIW_REASON_STRUCT_SIZE, "kv.struct_size is 0");
  WITH(p.k.dl.ndim, 3, FIW_REASON_TENSOR_RANK,
       "kv.k: rank 3, expected 4 [num_pages, page_size, num_kv_heads, head_dim]");
  WITH(p.v.shape[0], p.v.shape[0] - 1, FIW_REASON_TENSOR_SHAPE, "kv.v has 6 pages, expected 7");
  WITH(p.v.shape[1], 8, FIW_REASON_TENSOR_SHAPE, "kv.v has 8 tokens a page, expected 16");
  WITH(p.v.dl.dtype, kF16.dtype, FIW_REASON_TENSOR_DTYPE, "kv.v is float16, expected float32, as kv.k");
  WITH(p.v.dl.device.device_type, kDLCUDA, FIW_REASON_TENSOR_DEVICE,
       "kv.v is on CUDA device 0, expected the CPU, as kv.k");
  WITH(p.cache.k_scale, NAN, FIW_REASON_SCALE, "k_scale");
  WITH(p.cache.v_scale, INFINITY, FIW_REASON_SCALE, "v_scale");
  WITH_BOTH(p.k.shape[0], 1, p.v.shape[0], 1, FIW_REASON_PAGE_INDEX, "kv has 1 pages");
  WITH_BOTH(p.cache.layout, FIW_LAYOUT_HND, p.params.causal, 1, FIW_REASON_PAGE_SIZE, "kv.page_size is 2");
  {
    const problem good = p;
    const int64_t shape[5] = {6, 3, 16, 2, 64};
    p.cache.kv = make(&p.kv, p.k_memory, kFloat, 5, shape);
    p.cache.k = p.cache.v = NULL;
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_SHAPE, "kv.kv: axis 1 has 3 entries, expected 2: K and V");
    p.kv.dl.ndim = 4;
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_RANK, "kv.kv: rank 4, expected 5");
    p = good;
    p.cache.k_head_scale = make1(&p.k_head_scale_t, p.lse_memory, kFloat, 3);
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_SHAPE, "kv.k_head_scale: shape [3], expected [2]");
    p = good;
  }
  /* params and extras */
  WITH(p.params.num_kv_heads, 3, FIW_REASON_HEAD_COUNT, "num_qo_heads is 8");
  WITH(p.params.struct_size, 7, FIW_REASON_STRUCT_SIZE, "params.struct_size is 7");
  WITH(p.params.sm_scale, NAN, FIW_REASON_SCALE, "sm_scale");
  WITH(p.params.sm_scale, 3e38f, FIW_REASON_SCALE, "sm_scale is 3e+38, expected a finite value of at most 1e+30");
  WITH(p.params.window_left, -2, FIW_REASON_WINDOW, "window_left is -2");
  WITH(p.params.logits_soft_cap, -1.0f, FIW_REASON_SOFT_CAP, "logits_soft_cap is -1");
  WITH(p.extras.struct_size, 0, FIW_REASON_STRUCT_SIZE, "extras.struct_size is 0");
  {
    const problem good = p;
    p.params.head_dim_qk = 100;
    CHECK_FAILS(call_once(ws, &p, NULL, &err), err, FIW_UNSUPPORTED, FIW_REASON_HEAD_DIM, "head_dim_qk is 100");
    p = good;
    float values[8] = {0};
    unsigned char mask[8] = {0};
    int32_t mask_indptr[3] = {0, 5, 9};
    p.extras.sinks = make1(&p.sinks_t, values, kFloat, 7);
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_SHAPE, "extras.sinks: shape [7], expected [8]");
    p.extras.sinks = NULL;
    p.extras.alibi_slopes = make1(&p.slopes_t, values, kF16.dtype, 8);
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_DTYPE, "extras.alibi_slopes: dtype");
    values[6] = -INFINITY;
    p.extras.alibi_slopes = make1(&p.slopes_t, values, kFloat, 8);
    CHECK_CALL_FAILS(FIW_REASON_ALIBI, "extras.alibi_slopes[6] is -inf, expected a finite value");
    p.extras.alibi_slopes = NULL;
    p.extras.mask = make1(&p.mask_t, mask, kU8, 7);
    CHECK_CALL_FAILS(FIW_REASON_MASK, "extras.mask_indptr is null beside a given extras.mask");
    p.extras.mask_indptr = ints(&p.mask_indptr_t, mask_indptr, 2);
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_SHAPE, "extras.mask_indptr: shape [2], expected [3]");
    ints(&p.mask_indptr_t, mask_indptr, 3);
    CHECK_CALL_FAILS(FIW_REASON_MASK, "extras.mask_indptr[2] is 9, expected 0..7");
    mask_indptr[2] = 5;
    CHECK_CALL_FAILS(FIW_REASON_MASK, "request 1");
    p.mask_t.dl.dtype = kI32;
    CHECK_CALL_FAILS(FIW_REASON_TENSOR_DTYPE, "extras.mask: dtype {code 0, bits 32, lanes 1}, expected uint8");
    p = good;
  }
  /* handles and structs that are not there */
#define CHECK_NULL(call, why, text) CHECK_FAILS(call, err, FIW_INVALID_ARGUMENT, why, text)
  CHECK_NULL(fiw_decode(NULL, &p.q.dl, &p.cache, p.table, &p.params, &p.out.dl, NULL, NULL, NULL, &err),
             FIW_REASON_OPTIONS, "ws is null");
  CHECK_NULL(fiw_decode(ws, NULL, &p.cache, p.table, &p.params, &p.out.dl, NULL, NULL, NULL, &err),
             FIW_REASON_TENSOR_NULL, "q is null, expected a tensor [rows, heads, dim]");
  CHECK_NULL(fiw_decode(ws, &p.q.dl, NULL, p.table, &p.params, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS,
             "kv is null");
  CHECK_NULL(fiw_decode(ws, &p.q.dl, &p.cache, NULL, &p.params, &p.out.dl, NULL, NULL, NULL, &err),
             FIW_REASON_TABLE_NULL, "table is null");
  CHECK_NULL(fiw_decode(ws, &p.q.dl, &p.cache, p.table, NULL, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS,
             "params is null");
  CHECK_NULL(fiw_decode(ws, &p.q.dl, &p.cache, p.table, &p.params, NULL, NULL, NULL, NULL, &err),
             FIW_REASON_TENSOR_NULL, "out is null");
  CHECK_NULL(fiw_prefill(ws, &p.q.dl, NULL, &p.cache, p.table, &p.params, &p.out.dl, NULL, NULL, NULL, &err),
             FIW_REASON_TENSOR_NULL, "qo_indptr is null");
  CHECK_NULL(fiw_verify(ws, &p.q.dl, 0, &p.cache, p.table, &p.params, &p.out.dl, NULL, NULL, NULL, &err), err.reason,
             "window");
  CHECK_NULL(fiw_step_run(NULL, &p.q.dl, &p.cache, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_OPTIONS,
             "step is null");
  fiw_plan_info info = FIW_PLAN_INFO_INIT;
  CHECK_NULL(fiw_step_info(NULL, &info, &err), FIW_REASON_OPTIONS, "step is null");
  CHECK_NULL(fiw_step_info(step, NULL, &err), FIW_REASON_OPTIONS, "info is null");
  info.struct_size = 1;
  CHECK_NULL(fiw_step_info(step, &info, &err), FIW_REASON_STRUCT_SIZE, "info.struct_size is 1");
  fiw_step* none = step;
  CHECK_NULL(fiw_plan_decode(ws, p.table, NULL, &none, &err), FIW_REASON_OPTIONS, "spec is null");
  CHECK(none == NULL);
  CHECK_NULL(fiw_plan_decode(ws, p.table, &spec, NULL, &err), FIW_REASON_OPTIONS, "out is null");
  fiw_step_spec no_params = spec;
  no_params.params = NULL;
  CHECK_NULL(fiw_plan_decode(ws, p.table, &no_params, &none, &err), FIW_REASON_OPTIONS, "spec.params is null");
  no_params = spec;
  no_params.kv_dtype.code = kDLUInt;
  CHECK_NULL(fiw_plan_decode(ws, p.table, &no_params, &none, &err), FIW_REASON_TENSOR_DTYPE, "spec.kv_dtype");
  CHECK_NULL(fiw_plan_prefill(ws, NULL, p.table, &spec, &none, &err), FIW_REASON_TENSOR_NULL, "qo_indptr is null");

  /* a step refuses what it was not planned for */
  WITH(p.q.shape[1], 4, FIW_REASON_TENSOR_SHAPE, "q has 4 heads, expected 8");
  {
    const problem good = p;
    p.extras.sinks = make1(&p.sinks_t, p.lse_memory, kFloat, 8);
    CHECK_NULL(fiw_step_run(step, &p.q.dl, &p.cache, &p.out.dl, NULL, &p.extras, NULL, &err), FIW_REASON_SINKS,
               "extras.sinks");
    p = good;
    p.q.shape[0] = 1;
    CHECK_NULL(fiw_step_run(step, &p.q.dl, &p.cache, &p.out.dl, NULL, NULL, NULL, &err), FIW_REASON_TENSOR_SHAPE,
               "q has 1 rows");
    p = good;
  }
  fiw_step_free(step);

  poison_results(&p);
  CHECK_OK(call_once(ws, &p, &p.lse.dl, &err), err);
  check_results(&p, "a call after many bad ones", 1);
  CHECK(call_once(ws, &p, &p.lse.dl, NULL) == FIW_OK);
  p.params.num_kv_heads = 3;
  CHECK(call_once(ws, &p, &p.lse.dl, NULL) == FIW_INVALID_ARGUMENT);
  fiw_workspace_free(ws);
  destroy(&p);
}

static void test_helpers(void) {
  fiw_error err = new_error();
  tensor a, b, c, d, e;
  float slopes[6];
  CHECK_OK(fiw_alibi_slopes(make1(&a, slopes, kFloat, 4), &err), err);
  for (int i = 0; i < 4; ++i) check_near("slope", slopes[i], pow(2.0, -2.0 * (i + 1)), 1e-7);
  CHECK_OK(fiw_alibi_slopes(make1(&a, slopes, kFloat, 6), &err), err);
  check_near("slope of the next power of two", slopes[4], pow(2.0, -1.0), 1e-7);
  check_near("slope of the next power of two", slopes[5], pow(2.0, -3.0), 1e-7);
  CHECK_FAILS(fiw_alibi_slopes(make1(&a, slopes, kFloat, 0), &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_HEAD_COUNT,
              "is 0");
  CHECK_FAILS(fiw_alibi_slopes(NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_TENSOR_NULL, "slopes is null");

  unsigned char booleans[16] = {1, 0, 1, 1, 0, 0, 0, 1, 1, /* then request 1 */ 0, 1}, mask[4] = {9, 9, 9, 9};
  const int32_t qo[3] = {3, 2, 0}, kv[3] = {3, 1, 7}, negative[3] = {3, -2, 0}, large[3] = {1 << 30, 1, 1};
  int32_t indptr[4] = {9, 9, 9, 9};
  size_t bytes = 0;
  ints(&b, qo, 3), ints(&c, kv, 3), make1(&d, mask, kU8, 3), ints(&e, indptr, 4);
  CHECK_OK(fiw_packed_mask_bytes(&b.dl, &c.dl, &bytes, &err), err);
  CHECK(bytes == 3);
  CHECK_OK(fiw_pack_mask(make1(&a, booleans, kU8, 11), &b.dl, &c.dl, &d.dl, &e.dl, &err), err);
  CHECK(mask[0] == 0x8D && mask[1] == 0x01 && mask[2] == 0x02 && mask[3] == 9);
  CHECK(indptr[0] == 0 && indptr[1] == 2 && indptr[2] == 3 && indptr[3] == 3);
  CHECK_FAILS(fiw_pack_mask(make1(&a, booleans, kU8, 10), &b.dl, &c.dl, &d.dl, &e.dl, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_MASK, "booleans has 10 entries");
  make1(&a, booleans, kU8, 11);
  CHECK_FAILS(fiw_pack_mask(&a.dl, &b.dl, &c.dl, make1(&d, mask, kU8, 4), &e.dl, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_SHAPE, "mask: shape [4], expected [3]");
  make1(&d, mask, kU8, 3);
  CHECK_FAILS(fiw_pack_mask(&a.dl, &b.dl, &c.dl, &d.dl, ints(&e, indptr, 3), &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_TENSOR_SHAPE, "mask_indptr: shape [3], expected [4]");
  CHECK_FAILS(fiw_pack_mask(&a.dl, &b.dl, &c.dl, make1(&d, indptr, kU8, 3), ints(&e, indptr, 4), &err), err,
              FIW_INVALID_ARGUMENT, FIW_REASON_TENSOR_OVERLAP, "mask_indptr overlaps mask");
  CHECK_FAILS(fiw_packed_mask_bytes(ints(&b, negative, 3), &c.dl, &bytes, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_MASK, "qo_lens[1] is -2");
  CHECK_FAILS(fiw_packed_mask_bytes(&c.dl, ints(&b, negative, 3), &bytes, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_MASK, "kv_lens[1] is -2");
  CHECK_FAILS(fiw_packed_mask_bytes(ints(&b, large, 3), ints(&a, large, 3), &bytes, &err), err, FIW_INVALID_ARGUMENT,
              FIW_REASON_SIZE_OVERFLOW, "requests 0..0");
  CHECK_FAILS(fiw_packed_mask_bytes(ints(&b, qo, 2), &c.dl, &bytes, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_BATCH,
              "kv_lens has 3 requests");
  CHECK_FAILS(fiw_packed_mask_bytes(ints(&b, qo, 3), &c.dl, NULL, &err), err, FIW_INVALID_ARGUMENT, FIW_REASON_OPTIONS,
              "bytes is null");
}

int main(int argc, char** argv) {
  random_state = argc > 1 ? strtoull(argv[1], NULL, 10) : (uint64_t)time(NULL);
  printf("seed %llu\n", (unsigned long long)random_state);
  random_state = random_state * 0x9E3779B97F4A7C15u + 1;
  test_version();
  test_struct_init();
  test_error_struct();
  test_workspace();
  test_options();
  test_page_table();
  test_device_table();
  test_bad_tables();
  test_helpers();
  test_sizes();
  test_attention();
  test_batch_invariant();
  test_ragged_prefill();
  test_append();
  test_merge_states();
  test_graphs();
  test_graph_append();
  test_live_graph();
  test_bad_graphs();
  test_bad_arguments();
  test_closed();
  test_stats_and_invalidation();
  test_fixed_size();
  test_allocator_and_busy();
  printf("%d passed, %d failed\n", checks_passed, checks_failed);
  return checks_failed == 0 ? 0 : 1;
}
