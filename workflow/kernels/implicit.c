/* See implicit.h. */
#include "gemm.h"
#include "implicit.h"
#include "planes.h"
#include "transpose.h"

#define CHUNK (1 << 19)      /* floats of padded images at a time */
#define MOST_COLUMNS (1 << 16) /* of a product, unless one image has more */
#define DEEP_ENOUGH 256      /* as a product's block of depth, where that is shortest */
#define FARTHEST ((int64_t)1 << 31) /* what tables reach */

int fits_tables(const Windows *s) {
    int64_t most = s->groups * (s->x_channels > s->y_channels ? s->x_channels : s->y_channels);
    int64_t padded = 1;
    for (int i = 0; i < AXES; i++) {
        int64_t reach = (s->kernel[i] - 1) * s->dilation[i];
        padded *= (s->x[i] > s->y[i] * s->stride[i] ? s->x[i] : s->y[i] * s->stride[i]) + 2 * (reach + s->stride[i]);
    }
    return most * padded < FARTHEST && s->x_channels * s->y_channels * s->offsets < FARTHEST;
}

static void run_tasks(const Call *call, void (*task)(void *, size_t), int64_t total, void *argument) {
    if (call)
        parallel(call, task, total, argument);
    else
        for (int64_t i = 0; i < total; i++) task(argument, (size_t)i);
}

/* The data itself is the matrix of columns. */
static int is_plain(const Windows *s) {
    for (int i = 0; i < AXES; i++)
        if (s->kernel[i] != 1 || s->stride[i] != 1 || s->pad[i] || s->x[i] != s->y[i]) return 0;
    return 1;
}

/* The axis along which to halve an output whose padded image is too large; -1 where it has none. */
static int halved(const Windows *s) { return s->y[0] > 1 ? 0 : s->y[1] > 1 ? 1 : s->y[2] > 1 ? 2 : -1; }

/* The lower half along an axis, or the upper one; the places of the output before it. */
static int64_t halve(Windows *s, int axis, int upper) {
    int64_t half = s->y[axis] / 2;
    s->y[axis] = upper ? s->y[axis] - half : half;
    s->pad[axis] -= upper ? half * s->stride[axis] : 0;
    s->y_size = product(s->y);
    return upper ? half : 0;
}

/* ---- the convolution ---- */

typedef struct {
    const Convolution *c;
    Planes p;
    int64_t first; /* image */
    float *to;
} Dealing;

static void deal_task(void *argument, size_t index) {
    const Dealing *d = argument;
    const Windows *s = &d->c->s;
    int64_t channel = (int64_t)index % s->x_channels, image = d->first + (int64_t)index / s->x_channels;
    int64_t whole = d->p.planes * d->p.apart;
    float *to = d->to + (int64_t)index * whole;
    memset(to, 0, (size_t)whole * sizeof(float));
    deal(s, &d->p, d->c->x + image * d->c->x_apart + channel * s->x_size, to);
}

/* Where in an image a place lies that is `index` in C's order, with such steps along the axes. */
static int64_t place_of(const int64_t *extent, const int64_t *steps, int64_t index) {
    int64_t w = index % extent[2], h = index / extent[2] % extent[1], d = index / extent[2] / extent[1];
    return d * steps[0] + h * steps[1] + w * steps[2];
}

/* A channel of a product that lies close, put where its places lie apart from each other. */
typedef struct {
    const float *from;
    float *to;
    const int32_t *places;
    int64_t count, row_c;
} Spreading;

static void spread_task(void *argument, size_t index) {
    const Spreading *s = argument;
    const float *from = s->from + (int64_t)index * s->count;
    float *to = s->to + (int64_t)index * s->row_c;
    for (int64_t i = 0; i < s->count; i++) to[s->places[i]] = from[i];
}

int convolve(const Call *call, const Convolution *c) {
    const Windows *s = &c->s;
    Dealing dealing = {.c = c};
    find_planes(s, &dealing.p);
    const Planes *p = &dealing.p;
    const int plain = is_plain(s), axis = halved(s);
    if (!plain && axis >= 0 && p->planes * p->apart * s->x_channels > CHUNK) {
        Convolution lower = *c, upper = *c;
        halve(&lower.s, axis, 0);
        upper.y += halve(&upper.s, axis, 1) * c->steps[axis];
        return convolve(call, &lower) && convolve(call, &upper);
    }
    int64_t whole = plain ? s->x_size : p->planes * p->apart, apart = plain ? c->x_apart : whole * s->x_channels;
    /* Each product reads the whole weight, so images may take as much memory as it does. */
    int64_t weight = s->y_channels * s->x_channels * s->offsets, chunk = call && weight > CHUNK ? weight : CHUNK;
    int64_t most = least(s->images, (plain ? MOST_COLUMNS : least(MOST_COLUMNS, chunk * s->y_size / apart)) / s->y_size);
    most = least(most, FARTHEST / (c->y_apart > apart ? c->y_apart : apart));
    if (most < 1) most = 1;
    most = divide_up(s->images, divide_up(s->images, most));
    Gemm gemm = {.m = s->y_channels, .n = most * s->y_size, .k = s->x_channels * s->offsets, .alpha = 1, .a = c->w};
    gemm.row_a = c->w_row, gemm.column_a = 1, gemm.row_c = c->y_row, gemm.start = c->bias;
    /* A deep product is summed in pieces, each of which would have to be put to its places. */
    const int spreads = c->steps[2] != 1 && gemm.k > DEEP_ENOUGH;
    int64_t dealt = plain ? 0 : most * apart, close_by = spreads ? gemm.m * gemm.n : 0;
    float *room = scratch(dealt + 2 * gemm.k + 2 * gemm.n + close_by + (call ? gemm_room(&gemm) : 0) + 1);
    if (!room) return 0;
    int32_t *rows = (int32_t *)(void *)(room + dealt), *depths = rows + gemm.k, *columns = depths + gemm.k;
    int32_t *places = columns + gemm.n;
    for (int64_t k = 0, at = 0; k < s->x_channels; k++)
        for (int64_t o = 0; o < s->offsets; o++, at++) {
            rows[at] = (int32_t)(k * whole + (plain ? 0 : plane_begin(s, p, o)));
            if (c->taps) depths[at] = (int32_t)(k * c->w_channel + c->taps[o]);
        }
    const int64_t of_plane[AXES] = {p->extent[1] * p->extent[2], p->extent[2], 1}, close[AXES] = {s->y[1] * s->y[2], s->y[2], 1};
    for (int64_t at = 0; at < gemm.n; at++) {
        int64_t image = at / s->y_size, place = at % s->y_size;
        columns[at] = (int32_t)(image * apart + place_of(s->y, plain ? close : of_plane, place));
        places[at] = (int32_t)(image * c->y_apart + place_of(s->y, c->steps, place));
    }
    gemm.rows = rows, gemm.columns = columns, gemm.depths = c->taps ? depths : NULL;
    if (!spreads) gemm.places = places;
    float *sums = (float *)(void *)(places + gemm.n), *packed = sums + close_by;
    dealing.to = room;
    for (int64_t first = 0; first < s->images; first += most) {
        int64_t images = least(most, s->images - first);
        dealing.first = first;
        if (!plain) run_tasks(call, deal_task, images * s->x_channels, &dealing);
        gemm.n = images * s->y_size;
        gemm.b = plain ? c->x + first * c->x_apart : room;
        Spreading spreading = {sums, c->y + first * c->y_apart, places, gemm.n, c->y_row};
        gemm.c = spreads ? sums : spreading.to;
        if (spreads) gemm.row_c = gemm.n;
        if (call)
            gemm_shared_in(call, &gemm, packed);
        else
            gemm_alone(&gemm);
        if (spreads) run_tasks(call, spread_task, gemm.m, &spreading);
    }
    return 1;
}

/* ---- the gradient of the weight ---- */

/* Padded images with channels last, as far as windows reach. */
typedef struct {
    const WeightGradient *g;
    int64_t extent[AXES], size; /* of a padded image; its floats */
    int64_t first;              /* image */
    float *to;
} Turning;

/* A line of a padded image. */
static void turn_task(void *argument, size_t index) {
    const Turning *t = argument;
    const Windows *s = &t->g->s;
    int64_t lines = t->extent[0] * t->extent[1], image = (int64_t)index / lines, line = (int64_t)index % lines;
    int64_t d = line / t->extent[1] - s->pad[0], h = line % t->extent[1] - s->pad[1], channels = s->x_channels;
    int64_t first = s->pad[2] > 0 ? s->pad[2] : 0, end = least(t->extent[2], s->x[2] + s->pad[2]), wide = t->extent[2];
    float *to = t->to + image * t->size + line * wide * channels;
    if (d < 0 || d >= s->x[0] || h < 0 || h >= s->x[1] || first >= end) {
        memset(to, 0, (size_t)(wide * channels) * sizeof(float));
        return;
    }
    memset(to, 0, (size_t)(first * channels) * sizeof(float));
    memset(to + end * channels, 0, (size_t)((wide - end) * channels) * sizeof(float));
    const float *from = t->g->x + (t->first + image) * t->g->x_apart + (d * s->x[1] + h) * s->x[2] - s->pad[2];
    int64_t c = 0;
    for (; c + EDGE <= channels; c += EDGE) {
        int64_t i = first;
        const float *at = from + c * s->x_size;
        for (; i + EDGE <= end; i += EDGE) transpose(at + i, s->x_size, to + i * channels + c, channels);
        for (; i < end; i++)
            for (int64_t v = 0; v < EDGE; v++) to[i * channels + c + v] = at[v * s->x_size + i];
    }
    for (; c < channels; c++)
        for (int64_t i = first; i < end; i++) to[i * channels + c] = from[c * s->x_size + i];
}

/* The output's gradient of some images, [channel][image][place]. */
typedef struct {
    const WeightGradient *g;
    int64_t first, images;
    float *to;
} Joining;

static void join_task(void *argument, size_t index) {
    const Joining *j = argument;
    int64_t size = j->g->s.y_size, channel = (int64_t)index;
    float *to = j->to + channel * j->images * size;
    const float *from = j->g->y + j->first * j->g->y_apart + channel * j->g->y_row;
    for (int64_t i = 0; i < j->images; i++, to += size, from += j->g->y_apart)
        for (int64_t k = 0; k < size; k++) to[k] = from[k];
}

/* [row][place][channel] -> [row][channel][place] */
typedef struct {
    const float *from;
    float *to;
    int64_t channels, places;
    int add;
} Ordering;

static void order_task(void *argument, size_t index) {
    const Ordering *o = argument;
    int64_t size = o->channels * o->places;
    const float *from = o->from + (int64_t)index * size;
    float *to = o->to + (int64_t)index * size;
    for (int64_t k = 0; k < o->places; k++)
        for (int64_t c = 0; c < o->channels; c++) {
            float *at = to + c * o->places + k;
            *at = (o->add ? *at : 0) + from[k * o->channels + c];
        }
}

int weight_gradient(const Call *call, const WeightGradient *g) {
    const Windows *s = &g->s;
    Turning turning = {.g = g, .size = s->x_channels};
    for (int i = 0; i < AXES; i++) {
        turning.extent[i] = (s->y[i] - 1) * s->stride[i] + (s->kernel[i] - 1) * s->dilation[i] + 1;
        turning.size *= turning.extent[i];
    }
    const int axis = halved(s);
    /* Along the first axis of more than one place, so that the places of a half lie together. */
    if (axis >= 0 && turning.size > CHUNK) {
        WeightGradient lower = *g, upper = *g;
        int64_t size = 1;
        for (int i = axis + 1; i < AXES; i++) size *= s->y[i];
        halve(&lower.s, axis, 0);
        upper.y += halve(&upper.s, axis, 1) * size;
        upper.add = 1;
        return weight_gradient(call, &lower) && weight_gradient(call, &upper);
    }
    int64_t of_y = s->y_channels * s->y_size, lines = turning.extent[0] * turning.extent[1];
    int64_t most = least(s->images, CHUNK / (turning.size + of_y));
    if (most < 1) most = 1;
    Gemm gemm = {.m = s->y_channels, .n = s->x_channels * s->offsets, .k = most * s->y_size, .alpha = 1, .column_a = 1};
    /* Columns in the weight's order are packed one by one, in the data's vector by vector; but these are put in order
     * behind the product. */
    const int in_order = s->x_channels == 1 || s->offsets == 1 || s->images * s->y_size <= 2 * s->y_channels;
    int64_t turned = most * turning.size, joined = most > 1 ? most * of_y : 0, made = in_order ? 0 : gemm.m * gemm.n;
    float *room = scratch(turned + joined + made + gemm.k + gemm.n + (call ? gemm_room(&gemm) : 0) + 1);
    if (!room) return 0;
    float *y = room + turned, *w = in_order ? g->w : y + joined;
    int32_t *rows = (int32_t *)(void *)(y + joined + made), *columns = rows + gemm.k;
    int64_t steps[AXES] = {turning.extent[1] * turning.extent[2] * s->x_channels, turning.extent[2] * s->x_channels,
                           s->x_channels};
    for (int64_t o = 0; o < s->offsets; o++) {
        int64_t at = 0, rest = o;
        for (int i = AXES; i-- > 0; rest /= s->kernel[i]) at += rest % s->kernel[i] * s->dilation[i] * steps[i];
        for (int64_t c = 0; c < s->x_channels; c++)
            columns[in_order ? c * s->offsets + o : o * s->x_channels + c] = (int32_t)(at + c);
    }
    for (int i = 0; i < AXES; i++) steps[i] *= s->stride[i];
    for (int64_t at = 0; at < gemm.k; at++)
        rows[at] = (int32_t)(at / s->y_size * turning.size + place_of(s->y, steps, at % s->y_size));
    gemm.rows = rows, gemm.columns = columns, gemm.b = room, gemm.c = w, gemm.row_c = gemm.n;
    turning.to = room;
    for (int64_t first = 0; first < s->images; first += most) {
        int64_t images = least(most, s->images - first);
        Joining joining = {g, first, images, y};
        turning.first = first;
        run_tasks(call, turn_task, images * lines, &turning);
        if (images > 1) run_tasks(call, join_task, s->y_channels, &joining);
        gemm.a = images > 1 ? y : g->y + first * g->y_apart;
        gemm.k = images * s->y_size;
        gemm.row_a = images > 1 ? gemm.k : g->y_row;
        gemm.add = first > 0 || (in_order && g->add);
        if (call)
            gemm_shared_in(call, &gemm, (float *)(void *)(columns + gemm.n));
        else
            gemm_alone(&gemm);
    }
    Ordering ordering = {w, g->w, s->x_channels, s->offsets, g->add};
    if (!in_order) run_tasks(call, order_task, s->y_channels, &ordering);
    return 1;
}
