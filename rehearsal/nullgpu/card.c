// The pretended card: read once from the environment, then the same for every call of runtime and driver.
#include "nullgpu.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// One typical card for each compute capability; memory as the driver reports it.
typedef struct {
    int major, minor;
    const char *name;
    double memory_gib;
    int multiprocessors;
    size_t shared_kib_per_block, shared_kib_per_multiprocessor;
    int threads_per_multiprocessor;
    size_t l2_mib;
    int clock_mhz, memory_clock_mhz, memory_bus_bits;
} KnownCard;

static const KnownCard KNOWN_CARDS[] = {
    {9, 0, "NVIDIA H100 80GB HBM3", 79.1, 132, 227, 228, 2048, 50, 1980, 2619, 5120},   // first: the default
    {7, 0, "Tesla V100-SXM2-16GB", 15.8, 80, 96, 96, 2048, 6, 1530, 877, 4096},
    {7, 5, "Tesla T4", 14.6, 40, 64, 64, 1024, 4, 1590, 5001, 256},
    {8, 0, "NVIDIA A100-SXM4-80GB", 79.3, 108, 163, 164, 2048, 40, 1410, 1593, 5120},
    {8, 6, "NVIDIA GeForce RTX 3090", 23.7, 82, 99, 100, 1536, 6, 1695, 9751, 384},
    {8, 9, "NVIDIA GeForce RTX 4090", 23.5, 128, 99, 100, 1536, 72, 2520, 10501, 384},
    {10, 0, "NVIDIA B200", 178.4, 148, 227, 228, 2048, 126, 1965, 3996, 7680},
    {12, 0, "NVIDIA GeForce RTX 5090", 31.4, 170, 99, 100, 1536, 96, 2407, 14001, 512},
};
#define KNOWN_CARD_COUNT (sizeof KNOWN_CARDS / sizeof KNOWN_CARDS[0])

static Card card;
static pthread_once_t card_once = PTHREAD_ONCE_INIT;

static const char *setting(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static void refuse(const char *name, const char *value, const char *wanted) {
    fprintf(stderr, "null GPU: %s=%s is not %s\n", name, value, wanted);
    exit(2);
}

static int read_count(void) {
    const char *text = setting("NULLGPU_COUNT");
    int count = text ? atoi(text) : 8;
    if (count < 0 || count > MAX_DEVICES) refuse("NULLGPU_COUNT", text, "a number from 0 to 64");
    return count;
}

static const KnownCard *read_capability(void) {
    const char *text = setting("NULLGPU_CAPABILITY");
    if (!text) return &KNOWN_CARDS[0];
    int major = 0, minor = 0;
    sscanf(text, "%d.%d", &major, &minor);
    for (size_t i = 0; i < KNOWN_CARD_COUNT; i++)
        if (KNOWN_CARDS[i].major == major && KNOWN_CARDS[i].minor == minor) return &KNOWN_CARDS[i];
    refuse("NULLGPU_CAPABILITY", text, "one of 7.0, 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0");
    return NULL;
}

static size_t read_memory(const KnownCard *known) {
    const char *text = setting("NULLGPU_MEMORY_GIB");
    double gib = text ? atof(text) : known->memory_gib;
    if (gib < 1) refuse("NULLGPU_MEMORY_GIB", text, "a number of GiB of at least 1");
    return (size_t)(gib * (double)GIB) / MIB * MIB;
}

static void read_card(void) {
    const KnownCard *known = read_capability();
    card.count = read_count();
    card.major = known->major;
    card.minor = known->minor;
    card.memory_bytes = read_memory(known);
    card.multiprocessors = known->multiprocessors;
    card.shared_memory_per_block = known->shared_kib_per_block * KIB;
    card.shared_memory_per_multiprocessor = known->shared_kib_per_multiprocessor * KIB;
    card.threads_per_multiprocessor = known->threads_per_multiprocessor;
    card.l2_cache_bytes = known->l2_mib * MIB;
    card.clock_khz = known->clock_mhz * 1000;
    card.memory_clock_khz = known->memory_clock_mhz * 1000;
    card.memory_bus_bits = known->memory_bus_bits;
    // The name ends up in run logs, so it must not pass for a real card.
    const char *name = setting("NULLGPU_NAME");
    snprintf(card.name, sizeof card.name, "%.100s (null GPU)", name ? name : known->name);
}

const Card *nullgpu_card(void) {
    pthread_once(&card_once, read_card);
    return &card;
}

void *nullgpu_handle(void) {
    static uintptr_t last = 0x100000;
    return (void *)__atomic_add_fetch(&last, 16, __ATOMIC_RELAXED);
}
