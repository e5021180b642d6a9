/* Predictions of linear models: scores of all labels, or the best labels of each row down a tree of labels.

   The weights of the children of a node lie feature by feature (a chunk), so that a row looks each of its features up
   once per node. A flat model is a tree of one node. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

#define EXPORT __attribute__((visibility("default")))
#define GRAIN 64 /* rows that a thread takes at a time */

enum { IDENTITY, SIGMOID, HINGE };

/* A tree and its weights. */
struct tree {
    int64_t n_nodes, n_features, n_labels;
    const int64_t *child_start;  /* where each node's children start */
    const int32_t *child;        /* a label, or ~node */
    const float *intercept;      /* one per child, as all of the next three */
    const float *scale, *offset; /* the probability of a child is link(scale * score + offset) */
    const int64_t *feature_start; /* where each node's features start */
    const int32_t *feature;       /* increasing within a node */
    const int64_t *entry_start;   /* where each feature's weights start; one more than there are features */
    const int32_t *entry_child;   /* which child of the node */
    const float *entry_value;
};

struct predict_call {
    const struct tree *trees;
    int64_t n_trees;
    int64_t n_rows;
    const int64_t *indptr;
    const int32_t *indices; /* increasing within a row */
    const float *values;
    int64_t beam, k;
    int link, threads;
    int32_t *index; /* n_rows x k, -1 where there are fewer */
    float *score;   /* n_rows x k; all labels of a flat model: n_rows x n_labels */
    volatile int *stop;
};

/* ---- Weights of children, feature by feature. ---- */

/* Count the distinct features of each node; `map` has n_features zeros, and is left so. */
EXPORT void linear_count_features(int64_t n_nodes, const int64_t *child_start, const int64_t *indptr,
                                  const int32_t *indices, int32_t *map, int64_t *feature_start) {
    feature_start[0] = 0;
    for (int64_t node = 0; node < n_nodes; node++) {
        int64_t from = indptr[child_start[node]], to = indptr[child_start[node + 1]], distinct = 0;
        for (int64_t t = from; t < to; t++) distinct += !map[indices[t]]++;
        for (int64_t t = from; t < to; t++) map[indices[t]] = 0;
        feature_start[node + 1] = feature_start[node] + distinct;
    }
}

static int compare(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Fill the features and the weights of each node. */
EXPORT void linear_fill_features(int64_t n_nodes, const int64_t *child_start, const int64_t *indptr,
                                 const int32_t *indices, const float *values, int32_t *map,
                                 const int64_t *feature_start, int32_t *feature, int64_t *entry_start,
                                 int32_t *entry_child, float *entry_value) {
    int64_t at = 0;
    for (int64_t node = 0; node < n_nodes; node++) {
        int64_t first = child_start[node], last = child_start[node + 1];
        int64_t from = indptr[first], to = indptr[last], n = 0;
        int32_t *own = feature + feature_start[node];
        for (int64_t t = from; t < to; t++)
            if (!map[indices[t]]++) own[n++] = indices[t];
        qsort(own, (size_t)n, sizeof *own, compare);
        int64_t *start = entry_start + feature_start[node];
        for (int64_t j = 0; j < n; j++) {
            start[j] = at;
            at += map[own[j]];
            map[own[j]] = (int32_t)j;
        }
        for (int64_t c = first; c < last; c++)
            for (int64_t t = indptr[c]; t < indptr[c + 1]; t++) {
                int64_t place = start[map[indices[t]]]++;
                entry_child[place] = (int32_t)(c - first);
                entry_value[place] = values[t];
            }
        for (int64_t j = n - 1; j >= 0; j--) { /* each start has moved to the next one's */
            start[j] = j ? start[j - 1] : from;
            map[own[j]] = 0;
        }
    }
    entry_start[feature_start[n_nodes]] = at;
}

/* ---- One row. ---- */

struct found {
    int32_t id; /* a label, or a node */
    float score;
};

struct space {
    float *scores;                    /* of the children of a node */
    struct found *nodes, *next, *best; /* the beam; the nodes of the next level; the labels seen */
    int64_t next_room, best_room;
    float *sum;    /* per label: summed over the trees; 0 between rows */
    int32_t *seen; /* labels with a sum */
    int failed;
};

/* Add the scores of the children of a node to `scores`. */
static void node_scores(const struct tree *tree, int64_t node, const int32_t *index, const float *value, int64_t n,
                        float *restrict scores) {
    int64_t children = tree->child_start[node + 1] - tree->child_start[node];
    memcpy(scores, tree->intercept + tree->child_start[node], (size_t)children * sizeof *scores);
    const int32_t *feature = tree->feature;
    int64_t at = tree->feature_start[node], end = tree->feature_start[node + 1];
    if (end - at == tree->n_features) { /* all of them */
        for (int64_t t = 0; t < n; t++) {
            int64_t place = at + index[t], to = tree->entry_start[place + 1];
            for (int64_t e = tree->entry_start[place]; e < to; e++)
                scores[tree->entry_child[e]] += value[t] * tree->entry_value[e];
        }
        return;
    }
    for (int64_t t = 0; t < n && at < end; t++) {
        int32_t wanted = index[t];
        int64_t step = 1, low = at;
        while (low + step < end && feature[low + step] < wanted) { /* gallop: both lists increase */
            low += step;
            step *= 2;
        }
        int64_t high = low + step < end ? low + step + 1 : end;
        while (low < high) {
            int64_t middle = low + (high - low) / 2;
            if (feature[middle] < wanted)
                low = middle + 1;
            else
                high = middle;
        }
        at = low;
        if (at < end && feature[at] == wanted) {
            int64_t to = tree->entry_start[at + 1];
            for (int64_t e = tree->entry_start[at]; e < to; e++)
                scores[tree->entry_child[e]] += value[t] * tree->entry_value[e];
            at++;
        }
    }
}

/* The logarithm of a child's probability. */
static float log_link(int link, float z) {
    if (link == IDENTITY) return z;
    if (link == SIGMOID) return fminf(z, 0) - log1pf(expf(-fabsf(z)));
    float gap = fmaxf(0, 1 - z);
    return -gap * gap;
}

static int better(struct found a, struct found b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

static int compare_found(const void *a, const void *b) {
    const struct found *x = a, *y = b;
    return better(*x, *y) ? -1 : better(*y, *x);
}

/* Move the `keep` best to the front, in no order. */
static void select_best(struct found *list, int64_t n, int64_t keep) {
    int64_t first = 0, last = n - 1;
    if (keep >= n) return;
    while (first < last) {
        struct found pivot = list[first + (last - first) / 2];
        int64_t i = first, j = last;
        while (i <= j) {
            while (better(list[i], pivot)) i++;
            while (better(pivot, list[j])) j--;
            if (i <= j) {
                struct found kept = list[i];
                list[i++] = list[j];
                list[j--] = kept;
            }
        }
        if (keep - 1 <= j)
            last = j;
        else if (keep - 1 >= i)
            first = i;
        else
            return;
    }
}

static int push(struct found **list, int64_t *room, int64_t n, int32_t id, float score) {
    if (n == *room) {
        int64_t larger = *room ? 2 * *room : 256;
        struct found *grown = realloc(*list, (size_t)larger * sizeof *grown);
        if (!grown) return 0;
        *list = grown;
        *room = larger;
    }
    (*list)[n] = (struct found){id, score};
    return 1;
}

/* Walk down one tree; the labels reached and the logarithms of their probabilities are in `best`. Returns how many. */
static int64_t walk(const struct predict_call *call, const struct tree *tree, int64_t row, struct space *space) {
    int64_t from = call->indptr[row], n = call->indptr[row + 1] - from, width = 1, labels = 0;
    space->nodes[0] = (struct found){0, 0};
    while (width) {
        int64_t n_next = 0;
        for (int64_t b = 0; b < width; b++) {
            int64_t node = space->nodes[b].id, first = tree->child_start[node];
            int64_t children = tree->child_start[node + 1] - first;
            node_scores(tree, node, call->indices + from, call->values + from, n, space->scores);
            for (int64_t c = 0; c < children; c++) {
                float z = space->scores[c] * tree->scale[first + c] + tree->offset[first + c];
                float score = space->nodes[b].score + log_link(call->link, z);
                int32_t child = tree->child[first + c];
                int ok = child >= 0 ? push(&space->best, &space->best_room, labels++, child, score)
                                    : push(&space->next, &space->next_room, n_next++, ~child, score);
                if (!ok) {
                    space->failed = 1;
                    return 0;
                }
            }
        }
        width = n_next < call->beam ? n_next : call->beam;
        select_best(space->next, n_next, width);
        memcpy(space->nodes, space->next, (size_t)width * sizeof *space->nodes);
    }
    return labels;
}

static void predict_row(const struct predict_call *call, int64_t row, struct space *space) {
    int64_t n = 0;
    if (call->n_trees == 1)
        n = walk(call, call->trees, row, space);
    else { /* the mean of the trees' probabilities; a label that a tree does not reach has 0 there */
        int64_t seen = 0;
        for (int64_t t = 0; t < call->n_trees; t++) {
            int64_t found = walk(call, call->trees + t, row, space);
            int64_t keep = found < 4 * call->k ? found : 4 * call->k;
            select_best(space->best, found, keep);
            for (int64_t i = 0; i < keep; i++) {
                int32_t label = space->best[i].id;
                if (space->sum[label] == 0) space->seen[seen++] = label;
                space->sum[label] += expf(space->best[i].score) / (float)call->n_trees + 1e-37f;
            }
        }
        for (int64_t i = 0; i < seen; i++, n++) {
            int32_t label = space->seen[i];
            if (!push(&space->best, &space->best_room, n, label, logf(space->sum[label]))) space->failed = 1;
            space->sum[label] = 0;
        }
    }
    if (space->failed) return;
    int64_t keep = n < call->k ? n : call->k;
    select_best(space->best, n, keep);
    qsort(space->best, (size_t)keep, sizeof *space->best, compare_found);
    for (int64_t i = 0; i < call->k; i++) {
        call->index[row * call->k + i] = i < keep ? space->best[i].id : -1;
        call->score[row * call->k + i] = i < keep ? space->best[i].score : -INFINITY;
    }
}

struct job {
    const struct predict_call *call;
    struct space *spaces;
};

static void job_part(void *job, int64_t part, int slot) {
    const struct job *j = job;
    const struct predict_call *call = j->call;
    int64_t last = (part + 1) * GRAIN < call->n_rows ? (part + 1) * GRAIN : call->n_rows;
    for (int64_t i = part * GRAIN; i < last && !*call->stop && !j->spaces[slot].failed; i++) {
        if (call->index)
            predict_row(call, i, j->spaces + slot);
        else {
            int64_t from = call->indptr[i], n = call->indptr[i + 1] - from;
            node_scores(call->trees, 0, call->indices + from, call->values + from, n,
                        call->score + i * call->trees->n_labels);
        }
    }
}

/* Predict; without `index`, the scores of all children of the root. 0; 1 without memory; 2 where it was stopped. */
EXPORT int linear_predict(const struct predict_call *call) {
    int threads = call->threads < 1 ? 1 : call->threads > POOL_MAX ? POOL_MAX : call->threads;
    struct space *spaces = calloc((size_t)threads, sizeof *spaces);
    int failed = !spaces;
    int64_t most = 1, labels = call->n_trees > 1 ? call->trees->n_labels : 1;
    for (int64_t t = 0; t < call->n_trees; t++)
        for (int64_t node = 0; node < call->trees[t].n_nodes; node++) {
            int64_t children = call->trees[t].child_start[node + 1] - call->trees[t].child_start[node];
            most = children > most ? children : most;
        }
    for (int i = 0; i < threads && !failed; i++) {
        spaces[i].scores = malloc((size_t)most * sizeof(float));
        spaces[i].nodes = malloc((size_t)(call->beam + 1) * sizeof(struct found));
        spaces[i].sum = calloc((size_t)labels, sizeof(float));
        spaces[i].seen = malloc((size_t)labels * sizeof(int32_t));
        failed |= !spaces[i].scores || !spaces[i].nodes || !spaces[i].sum || !spaces[i].seen;
    }
    if (!failed) {
        struct job job = {call, spaces};
        pool_run(job_part, &job, (call->n_rows + GRAIN - 1) / GRAIN, threads);
    }
    for (int i = 0; spaces && i < threads; i++) {
        failed |= spaces[i].failed;
        free(spaces[i].scores);
        free(spaces[i].nodes);
        free(spaces[i].next);
        free(spaces[i].best);
        free(spaces[i].sum);
        free(spaces[i].seen);
    }
    free(spaces);
    return failed ? 1 : *call->stop ? 2 : 0;
}
