/* See planes.h. */
#include "planes.h"

void find_planes(const Windows *s, Planes *p) {
    *p = (Planes){.planes = product(s->stride)};
    for (int i = 0; i < AXES; i++) {
        int64_t most = (s->kernel[i] - 1) * s->dilation[i] / s->stride[i];
        p->extent[i] = s->y[i] + most;
        p->margin = p->margin * p->extent[i] + most;
        p->run = p->run * p->extent[i] + s->y[i] - 1;
    }
    p->run++;
    p->size = product(p->extent);
    p->apart = divide_up(p->size + BLOCK, 16) * 16;
    for (int64_t k = 0; k < s->offsets && s->offsets <= MOST_PLACES; k++) {
        p->begin[k] = plane_begin(s, p, k);
        p->plane[k] = (int32_t)(p->begin[k] / p->apart), p->shift[k] = (int32_t)(p->begin[k] % p->apart);
    }
}

int64_t plane_begin(const Windows *s, const Planes *p, int64_t k) {
    int64_t at[AXES] = {k / s->kernel[2] / s->kernel[1], k / s->kernel[2] % s->kernel[1], k % s->kernel[2]};
    int64_t plane = 0, shift = 0;
    for (int i = 0; i < AXES; i++) {
        int64_t begin = at[i] * s->dilation[i];
        plane = plane * s->stride[i] + begin % s->stride[i];
        shift = shift * p->extent[i] + begin / s->stride[i];
    }
    return plane * p->apart + shift;
}

static inline __attribute__((always_inline)) void between(const Windows *s, const Planes *p, float *image,
                                                          float *planes, int back) {
    for (int64_t plane = 0; plane < p->planes; plane++) {
        int64_t phase[AXES] = {plane / s->stride[2] / s->stride[1], plane / s->stride[2] % s->stride[1],
                               plane % s->stride[2]};
        int64_t shift = phase[2] - s->pad[2], step = s->stride[2], first = shift < 0 ? divide_up(-shift, step) : 0;
        int64_t end = s->x[2] > shift ? least(divide_up(s->x[2] - shift, step), p->extent[2]) : 0;
        for (int64_t line = 0; line < p->extent[0] * p->extent[1]; line++) {
            int64_t d = line / p->extent[1] * s->stride[0] + phase[0] - s->pad[0];
            int64_t h = line % p->extent[1] * s->stride[1] + phase[1] - s->pad[1];
            if (d < 0 || d >= s->x[0] || h < 0 || h >= s->x[1] || first >= end) continue;
            float *row = planes + plane * p->apart + line * p->extent[2];
            float *from = image + (d * s->x[1] + h) * s->x[2] + shift;
            if (back && step == 1)
                memcpy(from + first, row + first, (size_t)(end - first) * sizeof(float));
            else if (back)
                for (int64_t i = first; i < end; i++) from[i * step] = row[i];
            else if (step == 1)
                memcpy(row + first, from + first, (size_t)(end - first) * sizeof(float));
            else
                for (int64_t i = first; i < end; i++) row[i] = from[i * step];
        }
    }
}

void deal(const Windows *s, const Planes *p, const float *image, float *planes) {
    between(s, p, (float *)image, planes, 0);
}

void collect(const Windows *s, const Planes *p, float *image, const float *planes) {
    between(s, p, image, (float *)planes, 1);
}

static int64_t line_of(const Windows *s, const Planes *p, int64_t line) {
    return (line / s->y[1] * p->extent[1] + line % s->y[1]) * p->extent[2];
}

void stretch(const Windows *s, const Planes *p, const float *y, float *run) {
    for (int64_t line = 0; line < s->y[0] * s->y[1]; line++)
        memcpy(run + line_of(s, p, line), y + line * s->y[2], (size_t)s->y[2] * sizeof(float));
}

void shrink(const Windows *s, const Planes *p, float *y, const float *run) {
    for (int64_t line = 0; line < s->y[0] * s->y[1]; line++)
        memcpy(y + line * s->y[2], run + line_of(s, p, line), (size_t)s->y[2] * sizeof(float));
}
