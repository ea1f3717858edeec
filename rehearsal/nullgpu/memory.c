// Device memory: lazily mapped host pages, counted against the card's size.
//
// Torch's caching allocator asks for a few hundred large segments, so a plain list is fast enough.
#define _GNU_SOURCE
#include "nullgpu.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct Mapping {
    char *start;
    size_t bytes;
    int device;
    struct Mapping *next;
} Mapping;

static Mapping *mappings;
static size_t used_bytes[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool nullgpu_charge(int device, size_t bytes) {
    if (device == HOST) return true;
    pthread_mutex_lock(&lock);
    bool fits = used_bytes[device] + CONTEXT_BYTES + bytes <= nullgpu_card()->memory_bytes;
    if (fits) used_bytes[device] += bytes;
    pthread_mutex_unlock(&lock);
    return fits;
}

void nullgpu_refund(int device, size_t bytes) {
    if (device == HOST) return;
    pthread_mutex_lock(&lock);
    used_bytes[device] -= bytes;
    pthread_mutex_unlock(&lock);
}

size_t nullgpu_free_bytes(int device) {
    return nullgpu_card()->memory_bytes - CONTEXT_BYTES - used_bytes[device];
}

void *nullgpu_map(int device, size_t bytes) {
    if (bytes == 0) bytes = 1;
    void *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return NULL;
    madvise(start, bytes, MADV_NOHUGEPAGE);   // a touched byte should cost a page of the host, not two megabytes
    Mapping *mapping = malloc(sizeof *mapping);
    pthread_mutex_lock(&lock);
    *mapping = (Mapping){start, bytes, device, mappings};
    mappings = mapping;
    pthread_mutex_unlock(&lock);
    return start;
}

void nullgpu_unmap(void *start) {
    pthread_mutex_lock(&lock);
    Mapping **link = &mappings;
    while (*link && (*link)->start != start) link = &(*link)->next;
    Mapping *mapping = *link;
    if (mapping) *link = mapping->next;
    pthread_mutex_unlock(&lock);
    if (!mapping) return;
    munmap(mapping->start, mapping->bytes);
    free(mapping);
}

bool nullgpu_find(const void *address, int *device, void **start, size_t *bytes) {
    bool found = false;
    pthread_mutex_lock(&lock);
    for (Mapping *mapping = mappings; mapping && !found; mapping = mapping->next) {
        const char *where = address;
        found = where >= mapping->start && where < mapping->start + mapping->bytes;
        if (found) {
            *device = mapping->device;
            *start = mapping->start;
            *bytes = mapping->bytes;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

// Zeros that take no memory: whole pages are given back and read as zeros from then on.
static void make_zero(char *start, size_t bytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *first = (char *)(((uintptr_t)start + page - 1) / page * page);
    char *last = (char *)((uintptr_t)(start + bytes) / page * page);
    memset(start, 0, (size_t)(first - start));
    madvise(first, (size_t)(last - first), MADV_DONTNEED);
    memset(last, 0, (size_t)(start + bytes - last));
}

// A large copy to the host leaves zeros there: a script that looks at its weights must not find what was there before.
void nullgpu_copy(void *to, const void *from, size_t bytes) {
    int device = HOST;
    void *start;
    size_t size;
    if (bytes <= LARGEST_REAL_COPY) {
        if (to != from) memmove(to, from, bytes);
    } else if (nullgpu_find(from, &device, &start, &size) && device != HOST) {
        device = HOST;
        nullgpu_find(to, &device, &start, &size);
        if (device == HOST) make_zero(to, bytes);
    }
}
