/* An image dealt out so that what every place of a kernel reads is a run without gaps.
 *
 * There is a plane for each place modulo the strides, which holds the padded image at those places. Windows that lie
 * side by side read side by side there, over the rows' ends and the padding too; what comes of that is left out. */
#ifndef ORTFLOW_PLANES_H
#define ORTFLOW_PLANES_H

#include "vector.h"
#include "windows.h"

#define MOST_PLACES 256
#define BLOCK (4 * W) /* floats of a run at a time; runs have that many floats more than they need */

typedef struct {
    int64_t extent[AXES]; /* of a plane */
    int64_t size;         /* its floats */
    int64_t apart;        /* from one plane to the next */
    int64_t planes;
    int64_t run;          /* floats from the first output to the last, where rows are as long as the plane's */
    int64_t margin;       /* the largest shift */
    int32_t plane[MOST_PLACES], shift[MOST_PLACES]; /* that a place of the kernel reads, and from where */
    int64_t begin[MOST_PLACES];                     /* both in one, behind the first plane's begin */
} Planes;

/* The last three tables are of a kernel of at most MOST_PLACES places. */
void find_planes(const Windows *s, Planes *p);
/* What `begin` holds for a place of the kernel, of however many. */
int64_t plane_begin(const Windows *s, const Planes *p, int64_t place);
/* Where there is something of the image, it is written to the planes, or, `collect`, read from them. */
void deal(const Windows *s, const Planes *p, const float *image, float *planes);
void collect(const Windows *s, const Planes *p, float *image, const float *planes);
/* An output with rows as long as the plane's; and back. */
void stretch(const Windows *s, const Planes *p, const float *y, float *run);
void shrink(const Windows *s, const Planes *p, float *y, const float *run);

#endif
