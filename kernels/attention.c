/* Attention that tells what it did, on a CPU: output, statistics, and the gradients of both.

Built and called by c_build.py and c_backend.py. The semantics are those of options.py, the formulas
those of strips_forward.py and strips_backward.py; everything here is float32.

Letters: b sample, h query head, g key-value head, i query, j key, s key set; D head size, E value
size. A *block* is ROWS queries of one head, a *tile* a block against KEYS keys.

How it goes. For every block, tile by tile: scores by a small matrix product; options and masks, row
by row; the running maximum; exponentials in place; the product with v, which is rescaled whenever
the maximum grows. Column sums need the row's final sum, so the tiles of a block are kept, with the
maximum that each was computed under, and summed when the block is finished: no product is computed
twice. The backward pass computes the scores again from lse.

Every tile is three or five products of the same kind, A[MR rows] times a *panel* of B: PANEL
columns, row after row, zeros where B ends. The MR x PANEL results live in registers.

Work is cut into items that are computed in one fixed way whichever thread takes them, and partial
sums are added in the order of their items: the same number of threads gives the same bits. Threads
are started per call (tens of microseconds): no pool is left behind that a fork could break, and no
second OpenMP runtime competes with that of torch. */

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 2
#define MR 12
#elif defined(__AVX__)
#define LANES 8
#define VECTORS 2
#define MR 6
#elif defined(__aarch64__)
#define LANES 4
#define VECTORS 4
#define MR 6
#else
#define LANES 4
#define VECTORS 2
#define MR 6
#endif

#define PANEL (LANES * VECTORS)
#define ROWS 48  /* a multiple of MR */
#define KEYS 192 /* a multiple of MR and of PANEL */
#define GROUPS (ROWS / MR)

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

typedef float vec __attribute__((vector_size(4 * LANES), may_alias));
typedef float loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t iloose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* ------------------------------------------------------------------ the call, as Python fills it */

/* [b, head, position, ...] with a last stride of 1 */
typedef struct {
  float *data;
  int64_t batch, head, position;
} rows_t;

/* [b, h, i, j], any stride 0 where it is broadcast */
typedef struct {
  void *data;
  int64_t batch, head, query, key;
} scores_t;

typedef struct {
  int64_t batch, n_heads, n_key_value_heads, n_queries, n_keys, d, e, n_sets;
  int64_t nearest, farthest, n_threads, is_cut_after;
  float scale, softcap; /* softcap 0: none */
  rows_t q, k, v;
  scores_t mask_allowed, mask_added, bias;  /* uint8, float, float */
  scores_t slot, key_sets;                  /* float [b, h, i]; float [b, s, j] (head is the set) */
  const int32_t *prefix;                    /* [b] */
  const uint8_t *key_mask;                  /* [b, j] */
  const int32_t *query_documents, *key_documents; /* [b, i], [b, j] */
  const float *alibi, *temperature;         /* [h] */
  const int32_t *head_window;               /* [h, 2] */
  const int32_t *query_groups, *key_groups, *head_groups; /* [b, i], [b, j], [h] */
  const uint8_t *random_heads;              /* [h] */
  const int32_t *random_rows;               /* [b, h, i] */
  /* results, contiguous, any of them absent but out and lse: [b, h, i(, ...)], [b, h, j] */
  float *out, *lse, *entropy, *max, *mass, *sink_mass, *received;
  int32_t *largest_key;
  /* the backward pass: gradients that come in (absent where there are none), and go out */
  rows_t d_out;
  const float *d_lse, *d_entropy, *d_max, *d_mass, *d_sink_mass, *d_received;
  float *d_q, *d_k, *d_v, *d_slot; /* contiguous */
  scores_t d_bias;
} call_t;

/* ------------------------------------------------------------------ vectors */

INLINE vec splat(float x) {
  vec v = {0};
  return v + x;
}

INLINE vec load(const float *p) { return *(const loose *)p; }
INLINE void store(float *p, vec v) { *(loose *)p = v; }
INLINE vec choose(ivec condition, vec yes, vec no) {
  return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}
/* b where either is no number, so that a NaN in b comes through */
INLINE vec vmax(vec a, vec b) {
#if defined(__AVX512F__)
  return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
  return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return choose(a > b, a, b);
#endif
}
INLINE vec vmin(vec a, vec b) { return choose(a < b, a, b); }

INLINE float sum_of(vec v) {
  float total = 0;
  UNROLL for (int lane = 0; lane < LANES; lane++) total += v[lane];
  return total;
}
INLINE float max_of(vec v) {
  float most = v[0];
  UNROLL for (int lane = 1; lane < LANES; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
}

/* exp is 0 from here downwards: the exponent field of the power of two below becomes 0. */
#define LOWEST (-88.02f)

/* e^x for x <= 88: x = n log 2 + f, a polynomial in f (relative error 3e-9 before rounding), and n
   put into the exponent field. x must have been raised to LOWEST, -inf and all. */
INLINE vec exp_raised(vec x) {
  const float magic = 12582912.0f + 127.0f; /* 1.5 * 2^23: its last bits hold n + 127 */
  vec shifted = x * 1.44269504f + magic;
  vec n = shifted - magic;
  vec f = x - n * 0.693147181f;
  vec p = f * 0.0013814594f + 0.0083687194f;
  p = p * f + 0.0416683890f;
  p = p * f + 0.1666652113f;
  p = p * f + 0.4999999404f;
  p = p * f + 1.0f;
  p = p * f + 1.0f;
  return p * (vec)((ivec)shifted << 23);
}

INLINE vec vtanh(vec x) {
  vec z = x * x;
  vec p = z * -0.0057049870f + 0.0206390861f;
  p = p * z - 0.0537397154f;
  p = p * z + 0.1333144158f;
  p = p * z - 0.3333328068f;
  vec small = x + x * z * p;
  vec magnitude = vmin(vmax(x, -x), splat(20.0f));
  vec large = 1.0f - 2.0f / (exp_raised(magnitude + magnitude) + 1.0f);
  large = choose(x < 0.0f, -large, large);
  return choose(magnitude < 0.625f, small, large);
}

/* ------------------------------------------------------------------ small matrix products */

/* C[MR, PANEL] (+)= sum over k of A[r * row + k * step] * B[k, PANEL] */
INLINE void multiply(const float *a, int64_t row, int64_t step, const float *b, float *c,
                     int64_t c_row, int64_t n, int is_added) {
  vec sum[MR][VECTORS];
  UNROLL for (int r = 0; r < MR; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) {
      sum[r][v] = is_added ? load(c + r * c_row + v * LANES) : splat(0.0f);
    }
  }
  for (int64_t k = 0; k < n; k++) {
    vec column[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) column[v] = *(const vec *)(b + k * PANEL + v * LANES);
    UNROLL for (int r = 0; r < MR; r++) {
      float factor = a[r * row + k * step];
      UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] += factor * column[v];
    }
  }
  UNROLL for (int r = 0; r < MR; r++) {
    UNROLL for (int v = 0; v < VECTORS; v++) store(c + r * c_row + v * LANES, sum[r][v]);
  }
}

/* A by rows: C = A B */
static void set_product(const float *a, int64_t row, const float *b, float *c, int64_t c_row,
                        int64_t n) {
  multiply(a, row, 1, b, c, c_row, n, 0);
}
/* A by rows: C += A B */
static void add_product(const float *a, int64_t row, const float *b, float *c, int64_t c_row,
                        int64_t n) {
  multiply(a, row, 1, b, c, c_row, n, 1);
}
/* A by columns: C += A^T B */
static void add_transposed_product(const float *a, int64_t step, const float *b, float *c,
                                   int64_t c_row, int64_t n) {
  multiply(a, 1, step, b, c, c_row, n, 1);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t padded(int64_t n) { return (n + PANEL - 1) / PANEL * PANEL; }

/* Rows j of x as columns of panels: panels[j / PANEL][c][j % PANEL], for KEYS keys from first. */
static void pack_transposed(const float *x, int64_t stride, int64_t first, int64_t n_keys,
                            int64_t width, float *panels) {
  for (int64_t start = first; start < first + KEYS; start += PANEL) {
    float *panel = panels + (start / PANEL) * width * PANEL;
    int64_t n = most(0, least(PANEL, n_keys - start));
    for (int64_t lane = 0; lane < n; lane++) {
      const float *row = x + (start + lane) * stride;
      for (int64_t c = 0; c < width; c++) panel[c * PANEL + lane] = row[c];
    }
    for (int64_t lane = n; lane < PANEL; lane++) {
      for (int64_t c = 0; c < width; c++) panel[c * PANEL + lane] = 0.0f;
    }
  }
}

/* Columns of x as columns of panels: panels[c / PANEL][j][c % PANEL], for n rows from first; each
   panel has `height` rows in memory, and rows from n_rows on are zero. */
static void pack_straight(const float *x, int64_t stride, int64_t first, int64_t n, int64_t n_rows,
                          int64_t width, int64_t height, float *panels) {
  for (int64_t c0 = 0; c0 < width; c0 += PANEL) {
    int64_t columns = least(PANEL, width - c0);
    for (int64_t j = first; j < first + n; j++) {
      float *to = panels + c0 * height + j * PANEL;
      int64_t filled = 0;
      if (j < n_rows) {
        const float *from = x + j * stride + c0;
        for (; filled < columns; filled++) to[filled] = from[filled];
      }
      for (; filled < PANEL; filled++) to[filled] = 0.0f;
    }
  }
}

/* ------------------------------------------------------------------ scores of one row of a tile */

typedef struct {
  int64_t b, h, i;
  int64_t low, high;               /* keys at an allowed distance, clipped to the sequence */
  int64_t window_low, window_high; /* the head's own window */
  int64_t prefix;
} row_t;

static row_t row_of(const call_t *c, int64_t b, int64_t h, int64_t i) {
  row_t r = {.b = b, .h = h, .i = i};
  int64_t place = i + c->n_keys - c->n_queries;
  r.low = most(0, least(c->n_keys, place - c->farthest));
  r.high = most(r.low, least(c->n_keys, place - c->nearest + 1));
  r.window_low = 0;
  r.window_high = c->n_keys;
  if (c->head_window) {
    r.window_low = most(0, least(c->n_keys, place - c->head_window[2 * h + 1]));
    r.window_high = most(r.window_low, least(c->n_keys, place - c->head_window[2 * h] + 1));
  }
  r.prefix = c->prefix ? least(c->n_keys, c->prefix[b]) : 0;
  return r;
}

/* Keys outside which no query in [first, last) of a head may look. */
static void range_of(const call_t *c, int64_t b, int64_t h, int64_t first, int64_t last,
                     int64_t *low, int64_t *high) {
  row_t top = row_of(c, b, h, first), bottom = row_of(c, b, h, last - 1);
  *low = top.prefix > 0 ? 0 : top.low;
  *high = most(bottom.high, top.prefix);
  *low = most(*low, top.window_low);
  *high = most(*low, least(*high, bottom.window_high));
}

/* Whether scores or masks need more than a product and a range of keys. */
static int has_options(const call_t *c) {
  return c->softcap != 0.0f || c->mask_allowed.data || c->mask_added.data || c->bias.data ||
         c->key_mask || c->query_documents || c->alibi || c->temperature ||
         (c->query_groups && !c->is_cut_after) || c->random_heads;
}

static uint32_t mixed(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

static int is_cut(const call_t *c, const row_t *r, int64_t j) {
  int32_t groups = c->query_groups[r->b * c->n_queries + r->i] & c->head_groups[r->h];
  return (groups & c->key_groups[r->b * c->n_keys + j]) != 0;
}

/* The score from s = scale * q k, for keys [from, to): s[0] is key `from`. Where slopes is given
   and there is a softcap, the derivative of the cap goes there. */
static void apply_options(const call_t *c, const row_t *r, float *s, float *slopes, int64_t from,
                          int64_t to) {
  int64_t n = least(to, c->n_keys) - from;
  if (c->softcap != 0.0f) {
    for (int64_t j = 0; j < to - from; j += LANES) { /* tiles are whole vectors */
      vec t = vtanh(load(s + j) / c->softcap);
      if (slopes) store(slopes + j, 1.0f - t * t);
      store(s + j, t * c->softcap);
    }
  }
  if (c->alibi) {
    float slope = c->alibi[r->h];
    int32_t distance = (int32_t)(r->i + c->n_keys - c->n_queries - from);
    for (int64_t j = 0; j < n; j++) s[j] -= slope * (float)abs(distance - (int32_t)j);
  }
  if (c->bias.data) {
    const scores_t *x = &c->bias;
    const float *bias = (const float *)x->data + r->b * x->batch + r->h * x->head +
                        r->i * x->query + from * x->key;
    for (int64_t j = 0; j < n; j++) s[j] += bias[j * x->key];
  }
  if (c->temperature) {
    float factor = c->temperature[r->h];
    for (int64_t j = 0; j < n; j++) s[j] = s[j] == -INFINITY ? s[j] : s[j] * factor;
  }
  if (c->random_heads && c->random_heads[r->h]) {
    uint32_t key = (uint32_t)c->random_rows[(r->b * c->n_heads + r->h) * c->n_queries + r->i];
    for (int64_t j = 0; j < n; j++) {
      uint32_t bits = mixed(key ^ ((uint32_t)(from + j) * 0x9e3779b1u));
      s[j] = logf(-logf(((float)(bits >> 9) + 0.5f) * 0x1p-23f));
    }
  }
  if (c->mask_added.data) {
    const scores_t *x = &c->mask_added;
    const float *added = (const float *)x->data + r->b * x->batch + r->h * x->head +
                         r->i * x->query + from * x->key;
    for (int64_t j = 0; j < n; j++) s[j] += added[j * x->key];
  }
  if (c->key_mask) {
    const uint8_t *mask = c->key_mask + r->b * c->n_keys + from;
    for (int64_t j = 0; j < n; j++) s[j] = mask[j] ? s[j] : -INFINITY;
  }
  if (c->query_documents) {
    int32_t own = c->query_documents[r->b * c->n_queries + r->i];
    const int32_t *documents = c->key_documents + r->b * c->n_keys + from;
    for (int64_t j = 0; j < n; j++) s[j] = documents[j] == own ? s[j] : -INFINITY;
  }
  if (c->mask_allowed.data) {
    const scores_t *x = &c->mask_allowed;
    const uint8_t *mask = (const uint8_t *)x->data + r->b * x->batch + r->h * x->head +
                          r->i * x->query + from * x->key;
    for (int64_t j = 0; j < n; j++) s[j] = mask[j * x->key] ? s[j] : -INFINITY;
  }
  if (c->query_groups && !c->is_cut_after) {
    for (int64_t j = 0; j < n; j++) s[j] = is_cut(c, r, from + j) ? -INFINITY : s[j];
  }
}

static void fill_masked(float *s, int64_t from, int64_t first, int64_t last) {
  for (int64_t j = first; j < last; j++) s[j - from] = -INFINITY;
}

/* -inf at keys of [from, to) whose distance is not allowed, and at those past the sequence. */
static void mask_distances(const row_t *r, float *s, int64_t from, int64_t to) {
  fill_masked(s, from, most(from, r->prefix), least(to, r->low));
  fill_masked(s, from, most(most(from, r->high), r->prefix), to);
  fill_masked(s, from, from, least(to, r->window_low));
  fill_masked(s, from, most(from, r->window_high), to);
}

/* ------------------------------------------------------------------ tiles and threads */

/* Columns of a tile, relative to its first key, that each group of MR rows has to do with. */
typedef struct {
  int32_t from[GROUPS], to[GROUPS];
  int32_t least, most;
} span_t;

static span_t span_of(const call_t *c, int64_t b, int64_t h, int64_t first, int64_t n_rows,
                      int64_t tile) {
  span_t span = {.least = KEYS, .most = 0};
  int64_t start = tile * KEYS;
  for (int64_t g = 0; g * MR < n_rows; g++) {
    int64_t low, high, last = least(first + n_rows, first + (g + 1) * MR);
    range_of(c, b, h, first + g * MR, last, &low, &high);
    int64_t from = most(low - start, 0) / PANEL * PANEL;
    int64_t to = padded(most(0, least(high - start, KEYS)));
    span.from[g] = (int32_t)from;
    span.to[g] = (int32_t)most(from, to);
    if (from < to) {
      span.least = (int32_t)least(span.least, from);
      span.most = (int32_t)most(span.most, to);
    }
  }
  return span;
}

/* Memory of one thread; allocated once per call, and all of it or nothing. */
typedef struct {
  float *memory;
  float *k_transposed, *v_transposed, *k_straight, *v_straight; /* panels of one key-value head */
  uint8_t *is_packed;                                           /* per tile */
  int64_t packed_head;                                          /* b * n_key_value_heads + g */
  float *q, *d_out;                   /* rows of a block */
  float *q_panels, *d_out_panels;     /* the same as panels */
  float *strip, *slopes;              /* tiles of a block */
  float *gradient;                    /* one tile */
  float *weights;                     /* one tile */
  float *sum;                         /* out or dq of a block, padded */
  float *peaks;                       /* [tile, row]: the maximum that a tile was computed under */
  float *masses;                      /* [row, s] */
  span_t *spans;                      /* per tile */
  float *d_keys;                      /* [j, d] and [j, e], where an item is a whole head */
} scratch_t;

typedef struct work work_t;
struct work {
  const call_t *call;
  void (*run)(work_t *, scratch_t *, int64_t item);
  int64_t n_items, n_chunks, n_tiles, n_blocks;
  int is_backward, keeps_strip, has_options;
  int64_t *set_ranges; /* [b, s, 2]: keys outside which a set is empty */
  float *partial; /* per item, where items of one head are added up afterwards */
  int64_t partial_size;
  atomic_llong next;
  atomic_int failed;
};

static float *take(float **memory, int64_t n) {
  float *mine = *memory;
  *memory += (n + 15) / 16 * 16;
  return mine;
}

static int64_t lay_out(const work_t *w, scratch_t *s, float *memory) {
  const call_t *c = w->call;
  int64_t keys = w->n_tiles * KEYS, d = padded(c->d), e = padded(c->e);
  int64_t kept = w->keeps_strip ? w->n_tiles : 1;
  float *start = memory;
  s->k_transposed = take(&memory, keys * c->d);
  s->v_transposed = w->is_backward ? take(&memory, keys * c->e) : NULL;
  s->k_straight = w->is_backward ? take(&memory, keys * d) : NULL;
  s->v_straight = w->is_backward ? NULL : take(&memory, keys * e);
  s->q = take(&memory, ROWS * c->d);
  s->d_out = w->is_backward ? take(&memory, ROWS * c->e) : NULL;
  s->q_panels = w->is_backward ? take(&memory, ROWS * d) : NULL;
  s->d_out_panels = w->is_backward ? take(&memory, ROWS * e) : NULL;
  s->strip = take(&memory, kept * ROWS * KEYS);
  s->slopes = w->is_backward && c->softcap != 0.0f ? take(&memory, kept * ROWS * KEYS) : NULL;
  s->gradient = w->is_backward ? take(&memory, ROWS * KEYS) : NULL;
  s->weights = w->is_backward ? take(&memory, ROWS * KEYS) : NULL;
  s->sum = take(&memory, ROWS * most(d, e));
  s->peaks = take(&memory, kept * ROWS);
  s->masses = take(&memory, ROWS * most(1, c->n_sets));
  s->d_keys = w->is_backward && !w->partial ? take(&memory, w->partial_size) : NULL;
  s->spans = (span_t *)take(&memory, kept * (int64_t)(sizeof(span_t) / sizeof(float)));
  s->is_packed = (uint8_t *)take(&memory, (w->n_tiles + 3) / 4);
  return memory - start;
}

static void *serve(void *argument) {
  work_t *w = argument;
  scratch_t scratch = {.packed_head = -1};
  int64_t size = lay_out(w, &scratch, NULL);
  if (posix_memalign((void **)&scratch.memory, 64, (size_t)size * sizeof(float))) {
    atomic_store(&w->failed, 1);
    return NULL;
  }
#ifdef POISON
  memset(scratch.memory, 0xff, (size_t)size * sizeof(float)); /* NaN: nothing may be read unset */
#endif
  lay_out(w, &scratch, scratch.memory);
  for (;;) {
    int64_t item = atomic_fetch_add(&w->next, 1);
    if (item >= w->n_items) break;
    w->run(w, &scratch, item);
  }
  free(scratch.memory);
  return NULL;
}

/* Where the key sets have members, so that tiles without any are passed over. */
static int find_sets(work_t *w) {
  const call_t *c = w->call;
  w->set_ranges = malloc((size_t)(2 * c->batch * c->n_sets + 1) * sizeof(int64_t));
  if (!w->set_ranges) return 0;
  for (int64_t set = 0; set < c->batch * c->n_sets; set++) {
    const float *member = (float *)c->key_sets.data + set / c->n_sets * c->key_sets.batch +
                          set % c->n_sets * c->key_sets.head;
    int64_t first = 0, last = c->n_keys;
    while (first < last && member[first] == 0.0f) first++;
    while (last > first && member[last - 1] == 0.0f) last--;
    w->set_ranges[2 * set] = first;
    w->set_ranges[2 * set + 1] = last;
  }
  return 1;
}

/* Serve all items with some threads; this one is among them. 0 if all is done. */
static int serve_all(work_t *w) {
  if (!find_sets(w)) return 1;
  int64_t n_threads = w->call->n_threads;
  n_threads = most(1, least(n_threads, w->n_items));
  pthread_t threads[n_threads];
  int64_t n_started = 0;
  atomic_store(&w->next, 0);
  atomic_store(&w->failed, 0);
  while (n_started < n_threads - 1 &&
         pthread_create(&threads[n_started], NULL, serve, w) == 0) {
    n_started++;
  }
  serve(w);
  for (int64_t t = 0; t < n_started; t++) pthread_join(threads[t], NULL);
  free(w->set_ranges);
  /* a thread that got no memory leaves its items to the others, unless none got any */
  return atomic_load(&w->failed) && atomic_load(&w->next) < w->n_items;
}

/* Into how many chunks the blocks of `n_heads` heads are cut so that every thread has work. */
static int64_t chunks_for(const call_t *c, int64_t n_heads, int64_t n_blocks) {
  if (c->n_threads <= 1 || n_heads >= 2 * c->n_threads) return 1;
  return most(1, least(n_blocks, (2 * c->n_threads + n_heads - 1) / n_heads));
}

/* Forget the panels of another head. */
static void turn_to_head(const work_t *w, scratch_t *s, int64_t head) {
  if (s->packed_head != head) {
    memset(s->is_packed, 0, (size_t)w->n_tiles);
    s->packed_head = head;
  }
}

/* ------------------------------------------------------------------ forward */

typedef struct {
  float maximum, total, spread; /* m, sum e^(s - m), sum e^(s - m) (s - m); a slot included */
  float key_maximum;            /* over keys alone */
  int32_t largest_key;
} state_t;

/* Exponentials in place, their sum, and with weights s - m for the entropy. */
INLINE void exponentiate(float *s, int64_t n, state_t *state, int has_entropy) {
  vec total[2] = {splat(0.0f), splat(0.0f)}, spread[2] = {splat(0.0f), splat(0.0f)};
  const float maximum = state->maximum;
  for (int64_t j = 0; j < n; j += 2 * LANES) {
    UNROLL for (int u = 0; u < 2; u++) {
      vec x = vmax(splat(LOWEST), load(s + j + u * LANES) - maximum);
      vec p = exp_raised(x);
      total[u] += p;
      if (has_entropy) spread[u] += p * x;
      store(s + j + u * LANES, p);
    }
  }
  state->total += sum_of(total[0] + total[1]);
  if (has_entropy) state->spread += sum_of(spread[0] + spread[1]);
}

INLINE float dot(const float *a, const float *b, int64_t n) {
  vec sum = splat(0.0f);
  for (int64_t j = 0; j < n; j += LANES) sum += load(a + j) * load(b + j);
  return sum_of(sum);
}

/* Weights p of keys [from, to) that fall on a key set. */
static float mass_of(const work_t *w, int64_t b, int64_t set, const float *p, int64_t from,
                     int64_t to) {
  const call_t *c = w->call;
  const int64_t *range = w->set_ranges + 2 * (b * c->n_sets + set);
  const float *member = (float *)c->key_sets.data + b * c->key_sets.batch + set * c->key_sets.head;
  int64_t first = most(from, range[0]), last = least(to, range[1]);
  int64_t whole = first + most(0, last - first) / LANES * LANES;
  float sum = first < whole ? dot(p + (first - from), member + first, whole - first) : 0.0f;
  for (int64_t j = whole; j < last; j++) sum += p[j - from] * member[j];
  return sum;
}

/* One row of a tile: scores s of keys [from, to) become exponentials. */
static void forward_row(const work_t *w, const row_t *r, float *s, int64_t from, int64_t to,
                        state_t *state, float *out, float *masses) {
  const call_t *c = w->call;
  int64_t n = to - from;
  if (w->has_options) apply_options(c, r, s, NULL, from, to);
  mask_distances(r, s, from, to);
  vec most_here[2] = {load(s), load(s + LANES)};
  for (int64_t j = 2 * LANES; j < n; j += 2 * LANES) {
    most_here[0] = vmax(most_here[0], load(s + j));
    most_here[1] = vmax(most_here[1], load(s + j + LANES));
  }
  float peak = max_of(vmax(most_here[0], most_here[1]));
  if (peak > state->key_maximum) {
    state->key_maximum = peak;
    if (c->largest_key) {
      int64_t j = 0;
      while (s[j] != peak) j++;
      state->largest_key = (int32_t)(from + j);
    }
  }
  if (peak > state->maximum) {
    float step = state->maximum - peak;
    float factor = step == -INFINITY ? 0.0f : expf(step);
    state->spread = step == -INFINITY ? 0.0f : factor * (state->spread + step * state->total);
    state->total *= factor;
    for (int64_t x = 0; x < padded(c->e); x += LANES) store(out + x, load(out + x) * factor);
    for (int64_t x = 0; x < c->n_sets; x++) masses[x] *= factor;
    state->maximum = peak;
  }
  if (state->maximum == -INFINITY) {
    for (int64_t j = 0; j < n; j++) s[j] = 0.0f;
    return;
  }
  if (c->entropy) {
    exponentiate(s, n, state, 1);
  } else {
    exponentiate(s, n, state, 0);
  }
  if (c->is_cut_after) {
    int64_t n_here = least(to, c->n_keys) - from;
    for (int64_t j = 0; j < n_here; j++) s[j] = is_cut(c, r, from + j) ? 0.0f : s[j];
  }
  for (int64_t x = 0; x < c->n_sets; x++) masses[x] += mass_of(w, r->b, x, s, from, to);
}

static void store_row(const work_t *w, const row_t *r, const state_t *state, const float *out,
                      const float *masses) {
  const call_t *c = w->call;
  int64_t row = (r->b * c->n_heads + r->h) * c->n_queries + r->i;
  int is_dead = state->key_maximum == -INFINITY;
  float inverse = is_dead ? 0.0f : 1.0f / state->total;
  float lse = is_dead ? -INFINITY : state->maximum + logf(state->total);
  c->lse[row] = lse;
  if (c->entropy) {
    c->entropy[row] = is_dead ? 0.0f : logf(state->total) - state->spread * inverse;
  }
  if (c->max) c->max[row] = is_dead ? 0.0f : expf(state->key_maximum - state->maximum) * inverse;
  if (c->largest_key) c->largest_key[row] = state->largest_key;
  if (c->sink_mass) {
    const scores_t *x = &c->slot;
    float slot = ((float *)x->data)[r->b * x->batch + r->h * x->head + r->i * x->query];
    c->sink_mass[row] = is_dead ? 0.0f : expf(slot - state->maximum) * inverse;
  }
  for (int64_t x = 0; x < c->n_sets; x++) c->mass[row * c->n_sets + x] = masses[x] * inverse;
  for (int64_t x = 0; x < c->e; x++) c->out[row * c->e + x] = out[x] * inverse;
}

/* Add the weights of a finished block to what its keys receive: exponentials of each tile times
   e^(maximum then - lse). */
static void add_received(const call_t *c, const scratch_t *s, const float *lse, int64_t n_rows,
                         int64_t first_tile, int64_t n_tiles, float *received) {
  for (int64_t t = 0; t < n_tiles; t++) {
    const span_t *span = s->spans + t;
    const float *tile = s->strip + t * ROWS * KEYS;
    float *sums = received + (first_tile + t) * KEYS;
    float factor[ROWS] = {0};
    for (int64_t i = 0; i < n_rows; i++) {
      float peak = s->peaks[t * ROWS + i];
      factor[i] = peak == -INFINITY || lse[i] == -INFINITY ? 0.0f : expf(peak - lse[i]);
    }
    for (int64_t g = 0; g * MR < n_rows; g++) {
      int64_t n = least(MR, n_rows - g * MR);
      for (int64_t j = span->from[g]; j < span->to[g]; j += LANES) {
        vec sum = splat(0.0f);
        const float *column = tile + g * MR * KEYS + j;
        for (int64_t i = 0; i < n; i++) sum += factor[g * MR + i] * load(column + i * KEYS);
        int64_t here = least(LANES, c->n_keys - ((first_tile + t) * KEYS + j));
        if (here == LANES) {
          store(sums + j, load(sums + j) + sum);
        } else {
          for (int64_t lane = 0; lane < here; lane++) sums[j + lane] += sum[lane];
        }
      }
    }
  }
}

/* q * scale for the rows of a block, zeros in the rows that fill up its last group. */
static void gather_rows(const rows_t *x, int64_t b, int64_t h, int64_t first, int64_t n_rows,
                        int64_t width, float scale, float *to) {
  for (int64_t i = 0; i < n_rows; i++) {
    const float *row = x->data + b * x->batch + h * x->head + (first + i) * x->position;
    for (int64_t d = 0; d < width; d++) to[i * width + d] = row[d] * scale;
  }
  int64_t filled = (n_rows + MR - 1) / MR * MR;
  memset(to + n_rows * width, 0, (size_t)((filled - n_rows) * width) * sizeof(float));
}

/* Products of a tile's rows with transposed panels: scores, or the gradient of the weights. */
static void multiply_tile(const float *rows, int64_t width, const float *panels, int64_t n_rows,
                          int64_t tile, const span_t *span, float *to) {
  for (int64_t j = span->least; j < span->most; j += PANEL) {
    const float *panel = panels + (tile * KEYS + j) * width;
    for (int64_t g = 0; g * MR < n_rows; g++) {
      if (j >= span->from[g] && j < span->to[g]) {
        set_product(rows + g * MR * width, width, panel, to + g * MR * KEYS + j, KEYS, width);
      }
    }
  }
}

static void forward_block(const work_t *w, scratch_t *s, int64_t b, int64_t h, int64_t block,
                          float *received) {
  const call_t *c = w->call;
  int64_t group_size = c->n_heads / c->n_key_value_heads, kv = h / group_size;
  int64_t first = block * ROWS, n_rows = least(ROWS, c->n_queries - first);
  int64_t e = padded(c->e), n_padded = w->n_tiles * KEYS;
  const float *k = c->k.data + b * c->k.batch + kv * c->k.head;
  const float *v = c->v.data + b * c->v.batch + kv * c->v.head;
  int64_t low, high;
  range_of(c, b, h, first, first + n_rows, &low, &high);
  int64_t first_tile = low / KEYS, last_tile = (high + KEYS - 1) / KEYS;

  gather_rows(&c->q, b, h, first, n_rows, c->d, c->scale, s->q);
  memset(s->sum, 0, ROWS * (size_t)e * sizeof(float));
  memset(s->masses, 0, ROWS * (size_t)c->n_sets * sizeof(float));
  state_t states[ROWS];
  for (int64_t i = 0; i < n_rows; i++) {
    state_t start = {-INFINITY, 0.0f, 0.0f, -INFINITY, 0};
    if (c->slot.data) {
      const scores_t *x = &c->slot;
      float slot = ((float *)x->data)[b * x->batch + h * x->head + (first + i) * x->query];
      start.maximum = slot;
      start.total = slot == -INFINITY ? 0.0f : 1.0f;
    }
    states[i] = start;
  }
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    int64_t kept = w->keeps_strip ? tile - first_tile : 0;
    float *scores = s->strip + kept * ROWS * KEYS;
    span_t *span = s->spans + kept;
    *span = span_of(c, b, h, first, n_rows, tile);
    if (!s->is_packed[tile]) {
      pack_transposed(k, c->k.position, tile * KEYS, c->n_keys, c->d, s->k_transposed);
      pack_straight(v, c->v.position, tile * KEYS, KEYS, c->n_keys, c->e, n_padded, s->v_straight);
      s->is_packed[tile] = 1;
    }
    multiply_tile(s->q, c->d, s->k_transposed, n_rows, tile, span, scores);
    for (int64_t i = 0; i < n_rows; i++) {
      int64_t from = span->from[i / MR], to = span->to[i / MR];
      if (from < to) {
        row_t r = row_of(c, b, h, first + i);
        forward_row(w, &r, scores + i * KEYS + from, tile * KEYS + from, tile * KEYS + to,
                    &states[i], s->sum + i * e, s->masses + i * c->n_sets);
      }
      s->peaks[kept * ROWS + i] = states[i].maximum;
    }
    for (int64_t x = 0; x < e; x += PANEL) {
      const float *panel = s->v_straight + x * n_padded + tile * KEYS * PANEL;
      for (int64_t g = 0; g * MR < n_rows; g++) {
        int64_t from = span->from[g], n = span->to[g] - from;
        add_product(scores + g * MR * KEYS + from, KEYS, panel + from * PANEL,
                    s->sum + g * MR * e + x, e, n);
      }
    }
  }
  for (int64_t i = 0; i < n_rows; i++) {
    row_t r = row_of(c, b, h, first + i);
    store_row(w, &r, &states[i], s->sum + i * e, s->masses + i * c->n_sets);
  }
  if (received) {
    const float *lse = c->lse + (b * c->n_heads + h) * c->n_queries + first;
    add_received(c, s, lse, n_rows, first_tile, last_tile - first_tile, received);
  }
}

/* An item is every n_chunks-th block of one head. */
static void forward_item(work_t *w, scratch_t *s, int64_t item) {
  const call_t *c = w->call;
  int64_t head = item / w->n_chunks, chunk = item % w->n_chunks;
  int64_t b = head / c->n_heads, h = head % c->n_heads;
  turn_to_head(w, s, b * c->n_key_value_heads + h / (c->n_heads / c->n_key_value_heads));
  float *received = NULL;
  if (c->received) {
    received = w->partial ? w->partial + item * w->partial_size : c->received + head * c->n_keys;
  }
  for (int64_t block = chunk; block < w->n_blocks; block += w->n_chunks) {
    forward_block(w, s, b, h, block, received);
  }
}

int attention_forward(const call_t *c) {
  int64_t n_heads = c->batch * c->n_heads;
  work_t w = {.call = c, .run = forward_item, .has_options = has_options(c)};
  w.n_blocks = (c->n_queries + ROWS - 1) / ROWS;
  w.n_tiles = (c->n_keys + KEYS - 1) / KEYS;
  w.n_chunks = chunks_for(c, n_heads, w.n_blocks);
  w.n_items = n_heads * w.n_chunks;
  w.keeps_strip = c->received != NULL;
  w.partial_size = c->n_keys;
  if (c->received && w.n_chunks > 1) {
    w.partial = calloc((size_t)(w.n_items * w.partial_size), sizeof(float));
    if (!w.partial) return 1;
  }
  int failed = serve_all(&w);
  if (w.partial && !failed) {
    for (int64_t item = 0; item < w.n_items; item++) {
      float *sums = c->received + item / w.n_chunks * c->n_keys;
      const float *part = w.partial + item * w.partial_size;
      for (int64_t j = 0; j < c->n_keys; j++) sums[j] += part[j];
    }
  }
  free(w.partial);
  return failed;
}

/* ------------------------------------------------------------------ backward */

typedef struct {
  float lse, delta, d_entropy, entropy, d_peak;
  int32_t largest_key;
  int is_dead;
} gradient_t;

/* What of a row's gradient is known before its weights are. */
static gradient_t start_gradient(const call_t *c, int64_t b, int64_t h, int64_t i) {
  int64_t row = (b * c->n_heads + h) * c->n_queries + i;
  gradient_t g = {.lse = c->lse[row], .largest_key = -1};
  g.is_dead = g.lse == -INFINITY;
  if (g.is_dead) return g;
  const float *d_out = c->d_out.data + b * c->d_out.batch + h * c->d_out.head +
                       i * c->d_out.position;
  double delta = 0;
  for (int64_t x = 0; x < c->e; x++) delta += (double)d_out[x] * c->out[row * c->e + x];
  if (c->d_mass) {
    for (int64_t x = 0; x < c->n_sets; x++) {
      delta += (double)c->d_mass[row * c->n_sets + x] * c->mass[row * c->n_sets + x];
    }
  }
  if (c->d_lse) delta -= c->d_lse[row];
  if (c->d_sink_mass) delta += (double)c->d_sink_mass[row] * c->sink_mass[row];
  if (c->d_max) {
    g.d_peak = c->d_max[row] * c->max[row];
    g.largest_key = c->largest_key[row];
    delta += g.d_peak;
  }
  if (c->d_entropy) {
    g.d_entropy = c->d_entropy[row];
    g.entropy = c->entropy[row];
  }
  g.delta = (float)delta;
  return g;
}

/* Logarithms of the weights of a tile, LOWEST where they are 0. */
static void log_weights(const work_t *w, scratch_t *s, int64_t b, int64_t h, int64_t first,
                        int64_t n_rows, int64_t tile, const span_t *span,
                        const gradient_t *gradients, float *logs, float *slopes) {
  const call_t *c = w->call;
  multiply_tile(s->q, c->d, s->k_transposed, n_rows, tile, span, logs);
  for (int64_t i = 0; i < n_rows; i++) {
    int64_t from = tile * KEYS + span->from[i / MR], to = tile * KEYS + span->to[i / MR];
    if (from >= to) continue;
    float *row = logs + i * KEYS + span->from[i / MR];
    row_t r = row_of(c, b, h, first + i);
    if (w->has_options) {
      float *own_slopes = slopes ? slopes + i * KEYS + span->from[i / MR] : NULL;
      apply_options(c, &r, row, own_slopes, from, to);
    }
    mask_distances(&r, row, from, to);
    if (gradients[i].is_dead) {
      for (int64_t j = 0; j < to - from; j++) row[j] = LOWEST;
      continue;
    }
    for (int64_t j = 0; j < to - from; j += LANES) {
      store(row + j, vmax(splat(LOWEST), load(row + j) - gradients[i].lse));
    }
  }
}

/* sum over keys of weight * d_received, which delta needs before any gradient is known. */
static float received_share(const call_t *c, const row_t *r, const float *logs, int64_t from,
                            int64_t to) {
  const float *d_received = c->d_received + (r->b * c->n_heads + r->h) * c->n_keys + from;
  int64_t n = least(to, c->n_keys) - from;
  if (c->is_cut_after || n < to - from) {
    float sum = 0;
    for (int64_t j = 0; j < n; j++) {
      if (!c->is_cut_after || !is_cut(c, r, from + j)) sum += expf(logs[j]) * d_received[j];
    }
    return sum;
  }
  vec sum = splat(0.0f);
  for (int64_t j = 0; j < n; j += LANES) {
    sum += exp_raised(load(logs + j)) * load(d_received + j);
  }
  return sum_of(sum);
}

/* The gradient of the weights gets what does not come through v. */
static void add_to_weights_gradient(const work_t *w, const row_t *r, float *d_weights, int64_t from,
                                    int64_t to) {
  const call_t *c = w->call;
  int64_t n = least(to, c->n_keys) - from;
  if (c->d_received) {
    const float *d = c->d_received + (r->b * c->n_heads + r->h) * c->n_keys + from;
    for (int64_t j = 0; j < n; j++) d_weights[j] += d[j];
  }
  if (c->d_mass) {
    int64_t row = (r->b * c->n_heads + r->h) * c->n_queries + r->i;
    for (int64_t x = 0; x < c->n_sets; x++) {
      const int64_t *range = w->set_ranges + 2 * (r->b * c->n_sets + x);
      float factor = c->d_mass[row * c->n_sets + x];
      const float *set = (float *)c->key_sets.data + r->b * c->key_sets.batch +
                         x * c->key_sets.head;
      int64_t last = least(to, range[1]);
      for (int64_t j = most(from, range[0]); j < last; j++) {
        d_weights[j - from] += factor * set[j];
      }
    }
  }
  if (c->is_cut_after) {
    for (int64_t j = 0; j < n; j++) d_weights[j] = is_cut(c, r, from + j) ? 0.0f : d_weights[j];
  }
}

/* From scores back to scale * q k, on the way adding to the gradient of the bias. */
static void undo_options(const call_t *c, const row_t *r, float *d_scores, const float *slopes,
                         int64_t from, int64_t to) {
  int64_t n = least(to, c->n_keys) - from;
  if (c->random_heads && c->random_heads[r->h]) {
    for (int64_t j = 0; j < n; j++) d_scores[j] = 0.0f;
    return;
  }
  if (c->temperature) {
    for (int64_t j = 0; j < n; j++) d_scores[j] *= c->temperature[r->h];
  }
  if (c->d_bias.data) {
    const scores_t *x = &c->d_bias;
    float *d_bias = (float *)x->data + r->b * x->batch + r->h * x->head + r->i * x->query +
                    from * x->key;
    for (int64_t j = 0; j < n; j++) d_bias[j * x->key] += d_scores[j];
  }
  if (slopes) {
    for (int64_t j = 0; j < n; j++) d_scores[j] *= slopes[j];
  }
}

/* One row of a tile: weights as used, and the gradient of scale * q k, from the gradient of the
   weights. */
static void backward_row(const work_t *w, const row_t *r, const gradient_t *g, const float *logs,
                         const float *slopes, float *weights, float *gradient, int64_t from,
                         int64_t to) {
  const call_t *c = w->call;
  if (g->is_dead) {
    memset(weights, 0, (size_t)(to - from) * sizeof(float));
    memset(gradient, 0, (size_t)(to - from) * sizeof(float));
    return;
  }
  if (c->d_received || c->d_mass || c->is_cut_after) {
    add_to_weights_gradient(w, r, gradient, from, to);
  }
  const float d_entropy = g->d_entropy, entropy = g->entropy, delta = g->delta;
  for (int64_t j = 0; j < to - from; j += LANES) {
    vec log_weight = load(logs + j);
    vec weight = exp_raised(log_weight);
    store(weights + j, weight);
    vec inner = load(gradient + j) - delta - d_entropy * (log_weight + entropy);
    store(gradient + j, weight * inner);
  }
  if (g->largest_key >= from && g->largest_key < to) gradient[g->largest_key - from] += g->d_peak;
  if (c->is_cut_after) {
    int64_t n = least(to, c->n_keys) - from;
    for (int64_t j = 0; j < n; j++) weights[j] = is_cut(c, r, from + j) ? 0.0f : weights[j];
  }
  if (w->has_options) undo_options(c, r, gradient, slopes, from, to);
}

/* Zeros in the columns of a tile's rows that they have nothing to do with, and add_keys has. */
static void clear_outside(float *tile, const span_t *span, int64_t n_rows) {
  int64_t start = span->least / MR * MR, end = (span->most + MR - 1) / MR * MR;
  for (int64_t i = 0; i < n_rows; i++) {
    float *row = tile + i * KEYS;
    int64_t from = span->from[i / MR], to = span->to[i / MR];
    if (from >= to) from = to = end;
    for (int64_t j = start; j < from; j++) row[j] = 0.0f;
    for (int64_t j = to; j < end; j++) row[j] = 0.0f;
  }
}

/* total[key, :] += sum over rows of x[row, key] * panels[row, :], skipping rows that cannot see the
   keys. */
static void add_keys(const float *x, const span_t *span, int64_t n_rows, const float *panels,
                     int64_t width, float *total) {
  for (int64_t j = span->least / MR * MR; j < span->most; j += MR) {
    int64_t first = n_rows, last = 0;
    for (int64_t g = 0; g * MR < n_rows; g++) {
      if (span->from[g] < j + MR && span->to[g] > j) {
        first = least(first, g * MR);
        last = least(n_rows, (g + 1) * MR);
      }
    }
    for (int64_t d = 0; d < width && first < last; d += PANEL) {
      add_transposed_product(x + first * KEYS + j, KEYS, panels + d * ROWS + first * PANEL,
                             total + j * width + d, width, last - first);
    }
  }
}

static void pack_for_backward(const work_t *w, scratch_t *s, int64_t b, int64_t kv, int64_t tile) {
  const call_t *c = w->call;
  if (s->is_packed[tile]) return;
  const float *k = c->k.data + b * c->k.batch + kv * c->k.head;
  const float *v = c->v.data + b * c->v.batch + kv * c->v.head;
  int64_t n_padded = w->n_tiles * KEYS, start = tile * KEYS;
  pack_transposed(k, c->k.position, start, c->n_keys, c->d, s->k_transposed);
  pack_transposed(v, c->v.position, start, c->n_keys, c->e, s->v_transposed);
  pack_straight(k, c->k.position, start, KEYS, c->n_keys, c->d, n_padded, s->k_straight);
  s->is_packed[tile] = 1;
}

/* The slot is a key without a value: its gradient is that of a score. */
static void store_slot_gradient(const call_t *c, int64_t b, int64_t h, int64_t i,
                                const gradient_t *g) {
  int64_t row = (b * c->n_heads + h) * c->n_queries + i;
  const scores_t *x = &c->slot;
  float slot = ((float *)x->data)[b * x->batch + h * x->head + i * x->query];
  float log_weight = g->is_dead ? LOWEST : slot - g->lse;
  if (!(log_weight > LOWEST)) log_weight = LOWEST;
  float inner = -g->delta - g->d_entropy * (log_weight + g->entropy);
  if (c->d_sink_mass) inner += c->d_sink_mass[row];
  c->d_slot[row] = log_weight <= LOWEST ? 0.0f : expf(log_weight) * inner;
}

static void backward_block(const work_t *w, scratch_t *s, int64_t b, int64_t h, int64_t block,
                           float *d_k, float *d_v) {
  const call_t *c = w->call;
  int64_t kv = h / (c->n_heads / c->n_key_value_heads);
  int64_t first = block * ROWS, n_rows = least(ROWS, c->n_queries - first);
  int64_t d = padded(c->d), e = padded(c->e), n_padded = w->n_tiles * KEYS;
  int64_t low, high;
  range_of(c, b, h, first, first + n_rows, &low, &high);
  int64_t first_tile = low / KEYS, last_tile = (high + KEYS - 1) / KEYS;

  gather_rows(&c->q, b, h, first, n_rows, c->d, c->scale, s->q);
  gather_rows(&c->d_out, b, h, first, n_rows, c->e, 1.0f, s->d_out);
  pack_straight(s->q, c->d, 0, n_rows, n_rows, c->d, ROWS, s->q_panels);
  pack_straight(s->d_out, c->e, 0, n_rows, n_rows, c->e, ROWS, s->d_out_panels);
  memset(s->sum, 0, ROWS * (size_t)d * sizeof(float));
  gradient_t gradients[ROWS];
  for (int64_t i = 0; i < n_rows; i++) gradients[i] = start_gradient(c, b, h, first + i);

  if (c->d_received) {
    for (int64_t tile = first_tile; tile < last_tile; tile++) {
      int64_t kept = tile - first_tile;
      float *logs = s->strip + kept * ROWS * KEYS;
      float *slopes = s->slopes ? s->slopes + kept * ROWS * KEYS : NULL;
      span_t *span = s->spans + kept;
      *span = span_of(c, b, h, first, n_rows, tile);
      pack_for_backward(w, s, b, kv, tile);
      log_weights(w, s, b, h, first, n_rows, tile, span, gradients, logs, slopes);
      for (int64_t i = 0; i < n_rows; i++) {
        int64_t from = span->from[i / MR], to = span->to[i / MR];
        if (gradients[i].is_dead || from >= to) continue;
        row_t r = row_of(c, b, h, first + i);
        gradients[i].delta += received_share(c, &r, logs + i * KEYS + from, tile * KEYS + from,
                                             tile * KEYS + to);
      }
    }
  }
  for (int64_t tile = first_tile; tile < last_tile; tile++) {
    int64_t kept = w->keeps_strip ? tile - first_tile : 0;
    float *logs = s->strip + kept * ROWS * KEYS;
    float *slopes = s->slopes ? s->slopes + kept * ROWS * KEYS : NULL;
    span_t *span = s->spans + kept;
    if (!c->d_received) {
      *span = span_of(c, b, h, first, n_rows, tile);
      pack_for_backward(w, s, b, kv, tile);
      log_weights(w, s, b, h, first, n_rows, tile, span, gradients, logs, slopes);
    }
    multiply_tile(s->d_out, c->e, s->v_transposed, n_rows, tile, span, s->gradient);
    for (int64_t i = 0; i < n_rows; i++) {
      int64_t from = span->from[i / MR], to = span->to[i / MR];
      if (from >= to) continue;
      row_t r = row_of(c, b, h, first + i);
      int64_t place = i * KEYS + from;
      backward_row(w, &r, &gradients[i], logs + place, slopes ? slopes + place : NULL,
                   s->weights + place, s->gradient + place, tile * KEYS + from, tile * KEYS + to);
    }
    clear_outside(s->weights, span, n_rows);
    clear_outside(s->gradient, span, n_rows);
    add_keys(s->weights, span, n_rows, s->d_out_panels, e, d_v + tile * KEYS * e);
    add_keys(s->gradient, span, n_rows, s->q_panels, d, d_k + tile * KEYS * d);
    for (int64_t x = 0; x < d; x += PANEL) {
      const float *panel = s->k_straight + x * n_padded + tile * KEYS * PANEL;
      for (int64_t g = 0; g * MR < n_rows; g++) {
        int64_t from = span->from[g], n = span->to[g] - from;
        add_product(s->gradient + g * MR * KEYS + from, KEYS, panel + from * PANEL,
                    s->sum + g * MR * d + x, d, n);
      }
    }
  }
  for (int64_t i = 0; i < n_rows; i++) {
    int64_t row = (b * c->n_heads + h) * c->n_queries + first + i;
    for (int64_t x = 0; x < c->d; x++) c->d_q[row * c->d + x] = s->sum[i * d + x] * c->scale;
    if (c->d_slot) store_slot_gradient(c, b, h, first + i, &gradients[i]);
  }
}

/* Put (or add) the padded sums of one head or of a part of it where they belong. */
static void collect(const float *part, int64_t n_keys, int64_t width, int is_added, float *to) {
  for (int64_t j = 0; j < n_keys; j++) {
    const float *row = part + j * padded(width);
    for (int64_t x = 0; x < width; x++) {
      to[j * width + x] = (is_added ? to[j * width + x] : 0.0f) + row[x];
    }
  }
}

static void collect_keys(const work_t *w, int64_t head, const float *part, int is_added) {
  const call_t *c = w->call;
  collect(part, c->n_keys, c->d, is_added, c->d_k + head * c->n_keys * c->d);
  part += w->n_tiles * KEYS * padded(c->d);
  collect(part, c->n_keys, c->e, is_added, c->d_v + head * c->n_keys * c->e);
}

/* An item is every n_chunks-th block of the query heads of one key-value head. */
static void backward_item(work_t *w, scratch_t *s, int64_t item) {
  const call_t *c = w->call;
  int64_t head = item / w->n_chunks, chunk = item % w->n_chunks;
  int64_t b = head / c->n_key_value_heads, kv = head % c->n_key_value_heads;
  int64_t group_size = c->n_heads / c->n_key_value_heads;
  turn_to_head(w, s, head);
  float *d_k = w->partial ? w->partial + item * w->partial_size : s->d_keys;
  float *d_v = d_k + w->n_tiles * KEYS * padded(c->d);
  memset(d_k, 0, (size_t)w->partial_size * sizeof(float));
  for (int64_t n = chunk; n < group_size * w->n_blocks; n += w->n_chunks) {
    int64_t h = kv * group_size + n / w->n_blocks;
    backward_block(w, s, b, h, n % w->n_blocks, d_k, d_v);
  }
  if (!w->partial) collect_keys(w, head, d_k, 0);
}

int attention_backward(const call_t *c) {
  int64_t n_heads = c->batch * c->n_key_value_heads;
  work_t w = {.call = c, .run = backward_item, .is_backward = 1, .has_options = has_options(c)};
  w.n_blocks = (c->n_queries + ROWS - 1) / ROWS;
  w.n_tiles = (c->n_keys + KEYS - 1) / KEYS;
  w.n_chunks = chunks_for(c, n_heads, w.n_blocks * (c->n_heads / c->n_key_value_heads));
  w.n_items = n_heads * w.n_chunks;
  w.keeps_strip = c->d_received != NULL;
  w.partial_size = w.n_tiles * KEYS * (padded(c->d) + padded(c->e));
  if (w.n_chunks > 1) {
    w.partial = malloc((size_t)(w.n_items * w.partial_size) * sizeof(float));
    if (!w.partial) return 1;
  }
  int failed = serve_all(&w);
  for (int64_t item = 0; w.partial && !failed && item < w.n_items; item++) {
    collect_keys(&w, item / w.n_chunks, w.partial + item * w.partial_size, item % w.n_chunks > 0);
  }
  free(w.partial);
  return failed;
}
