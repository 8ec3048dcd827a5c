/* The part of ONNX Runtime's C API that the kernels use, by its place in the table.
 *
 * The table only ever grows at its end, so places hold for every release from 1.17 (ParallelFor) on;
 * https://onnxruntime.ai/docs/api/c/struct_ort_api.html lists it. */
#ifndef ORTFLOW_ORT_H
#define ORTFLOW_ORT_H

#include <stddef.h>
#include <stdint.h>

#define ORT_VERSION 19
#define ORT_ANY 0
#define ORT_FLOAT 1
#define ORT_INT64 7
#define ORT_DOUBLE 11
#define ORT_VARIADIC 2
#define ORT_FAIL 1
#define ORT_INVALID_ARGUMENT 2

typedef struct Status Status;
typedef struct Value Value;
typedef struct Shape Shape;
typedef struct Info Info;
typedef struct Context Context;
typedef struct Domain Domain;
typedef struct SessionOptions SessionOptions;
typedef struct CustomOp CustomOp;

typedef struct Api {
    Status *(*create_status)(int code, const char *message);
    void *skipped_1[25];
    Status *(*create_domain)(const char *name, Domain **out);
    Status *(*add_to_domain)(Domain *domain, const CustomOp *op);
    Status *(*add_domain)(SessionOptions *options, Domain *domain);
    void *skipped_29[22];
    Status *(*data)(Value *value, void **out);
    void *skipped_52[9];
    Status *(*rank)(const Shape *shape, size_t *out);
    Status *(*dims)(const Shape *shape, int64_t *out, size_t count);
    void *skipped_63[2];
    Status *(*shape)(const Value *value, Shape **out);
    void *skipped_66[19];
    Status *(*attribute_float)(const Info *info, const char *name, float *out);
    Status *(*attribute_int)(const Info *info, const char *name, int64_t *out);
    Status *(*attribute_string)(const Info *info, const char *name, char *out, size_t *size);
    Status *(*input_count)(const Context *context, size_t *out);
    Status *(*output_count)(const Context *context, size_t *out);
    Status *(*input)(const Context *context, size_t index, const Value **out);
    Status *(*output)(Context *context, size_t index, const int64_t *dims, size_t rank, Value **out);
    void *skipped_92[1];
    void (*release_status)(Status *status);
    void *skipped_94[5];
    void (*release_shape)(Shape *shape);
    void *skipped_100[174];
    Status *(*parallel_for)(const Context *context, void (*task)(void *, size_t), size_t total, size_t batches,
                            void *argument);
} Api;

#define AT(member, place) _Static_assert(offsetof(Api, member) == (place) * sizeof(void *), #member)
AT(create_domain, 26);
AT(data, 51);
AT(rank, 61);
AT(shape, 65);
AT(attribute_float, 85);
AT(attribute_string, 87);
AT(input_count, 88);
AT(output_count, 89);
AT(input, 90);
AT(release_status, 93);
AT(release_shape, 99);
AT(parallel_for, 274);
#undef AT

typedef struct ApiBase {
    const Api *(*api)(uint32_t version);
    const char *(*version)(void);
} ApiBase;

struct CustomOp {
    uint32_t version;
    void *(*create_1)(const CustomOp *, const Api *, const Info *);
    const char *(*name)(const CustomOp *);
    const char *(*provider)(const CustomOp *);
    int (*input_type)(const CustomOp *, size_t index);
    size_t (*inputs)(const CustomOp *);
    int (*output_type)(const CustomOp *, size_t index);
    size_t (*outputs)(const CustomOp *);
    void (*compute_1)(void *kernel, Context *);
    void (*destroy)(void *kernel);
    int (*input_kind)(const CustomOp *, size_t index);
    int (*output_kind)(const CustomOp *, size_t index);
    int (*input_memory)(const CustomOp *, size_t index);
    int (*least_inputs)(const CustomOp *);
    int (*like_inputs)(const CustomOp *);
    int (*least_outputs)(const CustomOp *);
    int (*like_outputs)(const CustomOp *);
    Status *(*create)(const CustomOp *, const Api *, const Info *, void **kernel);
    Status *(*compute)(void *kernel, Context *);
    Status *(*infer_shapes)(const CustomOp *, void *context);
    int (*since)(const CustomOp *);
    int (*until)(const CustomOp *);
    size_t (*may_inplace)(int **, int **);
    void (*release_inplace)(int *, int *);
    size_t (*aliases)(int **, int **);
    void (*release_aliases)(int *, int *);
};

#endif
