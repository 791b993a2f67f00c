// Emulates AMX on a CPU without it: each instruction on tiles raises SIGILL, is carried out here, and is skipped.
//
// This is loaded before all libraries (LD_PRELOAD). oneDNN asks Linux whether it may use tiles, which is answered here,
// and asks the CPU for its features by cpuid, which `pretend_tiles` overwrites with an instruction that raises SIGILL
// too. Only the features that oneDNN needs are claimed. They include AVX512-FP16, without which oneDNN uses no tiles,
// and of which it runs one instruction. Source: Intel's Software Developer's Manual, volumes 1 (18) and 2.

#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <immintrin.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { TILES = 8, ROWS = 16, BYTES = 64 };                   // of palette 1, the only one there is
enum { REFUSED = 0x0b0f, CPUID = 0xa20f };                   // ud2 and cpuid, as two bytes
enum { NONE, P66, F3, F2 };                                  // prefixes
enum { MAY = 0x1022, ASK = 0x1023, TILE_STATE = 3u << 17 };  // of arch_prctl, and the CPU's state that it is about

typedef struct {
  uint8_t palette, first_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
} Config;

static __thread Config config;
static __thread uint8_t tiles[TILES][ROWS][BYTES];
static long products;
static int errors = 2;

long products_of_tiles(void) { return products; }

static void die(const uint8_t* at, const char* why) {
  char line[160];
  const int size = snprintf(line, sizeof line, "pretended AMX: %s: %02x %02x %02x %02x %02x %02x\n", why, at[0], at[1],
                            at[2], at[3], at[4], at[5]);
  if (write(errors, line, size) < 0) _exit(1);
  signal(SIGABRT, SIG_DFL);
  abort();
}

// Makes the first two bytes of an instruction writable. Returns 0 on success.
static int writable(const uint8_t* at) {
  const uintptr_t page = sysconf(_SC_PAGESIZE), first = (uintptr_t)at;
  const uintptr_t from = first & -page, to = (first + 1 + page) & -page;
  return mprotect((void*)from, to - from, PROT_READ | PROT_WRITE | PROT_EXEC);
}

static void configure(const uint8_t* at, const Config* from) {
  config = *from;
  memset(tiles, 0, sizeof tiles);
  if (config.palette > 1 || config.first_row) die(at, "no such palette");
  for (int i = 0; i < TILES; ++i)
    if (config.bytes[i] > BYTES || config.rows[i] > ROWS) die(at, "a tile is too large");
}

// The first or second bfloat16 of each of 16 pairs as float32; subnormal numbers become 0.
static __m512 number(__m512i pairs, int second) {
  const __m512i n = second ? _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(pairs, 16);
  const __mmask16 tiny = _mm512_testn_epi32_mask(n, _mm512_set1_epi32(0x7f800000));
  return _mm512_castsi512_ps(_mm512_mask_and_epi32(n, tiny, n, _mm512_set1_epi32(0x80000000)));
}

static void add_bfloat16(uint8_t* to, const uint8_t* row, uint8_t (*columns)[BYTES], int pairs) {
  __m512 sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  for (int k = 0; k < pairs; ++k) {
    int32_t pair;
    memcpy(&pair, row + 4 * k, 4);
    const __m512i left = _mm512_set1_epi32(pair), right = _mm512_loadu_si512(columns[k]);
    for (int i = 0; i < 2; ++i) sums[i] = _mm512_fmadd_ps(number(left, i), number(right, i), sums[i]);
  }
  _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), _mm512_add_ps(sums[0], sums[1])));
}

static void add_bytes(uint8_t* to, const uint8_t* row, uint8_t (*columns)[BYTES], int fours, int left, int right) {
  int32_t sums[BYTES / 4];
  memcpy(sums, to, BYTES);
  for (int k = 0; k < fours; ++k)
    for (int n = 0; n < BYTES; ++n) {
      const uint8_t x = row[4 * k + n % 4], y = columns[k][n];
      sums[n / 4] += (left ? (int8_t)x : x) * (right ? (int8_t)y : y);
    }
  memcpy(to, sums, BYTES);
}

// Tile c += tile a times tile b, by pairs of bfloat16 (0x5c) or fours of bytes (0x5e; the prefix tells their signs).
static void multiply(const uint8_t* at, int prefix, int c, int a, int b) {
  const int rows = config.rows[c], bytes = config.bytes[c], terms = config.bytes[a] / 4;
  if (config.rows[a] != rows || config.bytes[b] != bytes || config.rows[b] != terms) die(at, "tiles do not fit");
  for (int i = 0; i < ROWS; ++i) {
    uint8_t* to = tiles[c][i];
    if (i >= rows)
      memset(to, 0, BYTES);
    else if (at[3] == 0x5c)
      add_bfloat16(to, tiles[a][i], tiles[b], terms);
    else
      add_bytes(to, tiles[a][i], tiles[b], terms, prefix == F3 || prefix == F2, prefix == P66 || prefix == F2);
    memset(to + bytes, 0, BYTES - bytes);
  }
  __atomic_fetch_add(&products, 1, __ATOMIC_RELAXED);
}

static void move(const uint8_t* at, int store, int tile, uint8_t* memory, int64_t stride) {
  if (!config.palette) die(at, "no tiles are configured");
  if (!store) memset(tiles[tile], 0, sizeof tiles[tile]);
  for (int i = 0; i < config.rows[tile]; ++i, memory += stride)
    memcpy(store ? memory : tiles[tile][i], store ? tiles[tile][i] : memory, config.bytes[tile]);
}

static void answer(greg_t* registers) {
  const uint32_t leaf = registers[REG_RAX], part = registers[REG_RCX];
  uint32_t a, b, c, d;
  __cpuid_count(leaf, part, a, b, c, d);
  if (leaf == 0 && a < 0x1e) a = 0x1e;
  if (leaf == 7 && part == 0) a = a ? a : 1, d |= 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;  // tiles and AVX512-FP16
  if (leaf == 7 && part == 1) a |= 1u << 4;                                                   // AVX-VNNI
  if (leaf == 0x1d) a = part == 0 ? 1 : part == 1 ? 1024u << 16 | 8192 : 0, b = 0, c = 0, d = 0;
  if (leaf == 0x1d && part == 1) b = TILES << 16 | BYTES, c = ROWS;
  if (leaf == 0x1e) a = 0, b = BYTES << 8 | ROWS, c = 0, d = 0;
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
}

static int64_t value_of(const greg_t* registers, int number) {
  static const int NAMES[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return registers[NAMES[number]];
}

static int64_t constant(const uint8_t** next, int bytes) {
  int32_t four;
  memcpy(&four, *next, sizeof four);
  const int64_t value = bytes == 1 ? (int8_t) * *next : four;
  *next += bytes;
  return value;
}

// Carries out an instruction (three bytes of VEX, an opcode, operands), and returns the address of the next one.
static const uint8_t* run(const uint8_t* at, const greg_t* registers) {
  if (at[0] != 0xc4 || (at[1] & 0x1f) != 2 || at[2] & 0x84) die(at, "not an instruction of tiles");
  const int prefix = at[2] & 3, third = ~(at[2] >> 3) & 15, opcode = at[3];
  const int mode = at[4] >> 6, tile = at[4] >> 3 & 7, second = at[4] & 7;
  const uint8_t* next = at + 5;
  int64_t memory = 0, stride = 0;
  if (mode != 3) {
    int base = second;
    if (second == 4) {
      const int sib = *next++, index = (sib >> 3 & 7) | (at[1] & 0x40 ? 0 : 8);
      base = sib & 7;
      if (index != 4) stride = value_of(registers, index) << (sib >> 6);
    }
    if (base == 5 && mode == 0) {
      memory = constant(&next, 4);
      if (second == 5) memory += (int64_t)next;
    } else {
      memory = value_of(registers, base | (at[1] & 0x20 ? 0 : 8));
    }
    if (mode == 1) memory += constant(&next, 1);
    if (mode == 2) memory += constant(&next, 4);
  }
  if (opcode == 0x49 && mode == 3 && prefix == F2)
    memset(tiles[tile], 0, sizeof tiles[tile]);
  else if (opcode == 0x49 && mode == 3 && prefix == NONE)
    configure(at, &(Config){0});
  else if (opcode == 0x49 && mode != 3 && prefix == NONE)
    configure(at, (const Config*)memory);
  else if (opcode == 0x49 && mode != 3 && prefix == P66)
    memcpy((void*)memory, &config, sizeof config);
  else if (opcode == 0x4b && mode != 3 && prefix != NONE)
    move(at, prefix == F3, tile, (uint8_t*)memory, stride);
  else if (mode == 3 && (opcode == 0x5e || (opcode == 0x5c && prefix == F3)))
    multiply(at, prefix, tile, second, third);
  else
    die(at, "an unknown instruction");
  return next;
}

// Whether this is the instruction of AVX512-FP16 that reads float16 (vcvtph2psx). If so, it is overwritten with that of
// AVX-512, which differs in one bit.
static int reads_float16(uint8_t* at) {
  if (at[0] != 0x62 || (at[1] & 3) != 2 || (at[2] & 0x83) != 1 || at[3] & 0x10 || at[4] != 0x13) return 0;
  if (writable(at)) die(at, "code that cannot be written over");
  at[1] &= ~4;
  return 1;
}

static void refused(int number, siginfo_t* info, void* context) {
  (void)number, (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  uint8_t* at = (uint8_t*)registers[REG_RIP];
  if (reads_float16(at)) return;
  const uint8_t* next = at + 2;
  if (at[0] == (REFUSED & 255) && at[1] == REFUSED >> 8)
    answer(registers);
  else
    next = run(at, registers);
  registers[REG_RIP] = (greg_t)next;
}

// Keeps the handler of SIGILL, which Python's faulthandler would replace.
int sigaction(int number, const struct sigaction* to, struct sigaction* from) {
  static int (*next)(int, const struct sigaction*, struct sigaction*);
  if (!next) next = dlsym(RTLD_NEXT, "sigaction");
  return number == SIGILL && to && to->sa_sigaction != refused ? 0 : next(number, to, from);
}

// Answers in place of Linux that tiles may be used.
long syscall(long number, ...) {
  static long (*next)(long, ...);
  if (!next) next = dlsym(RTLD_NEXT, "syscall");
  long a[6];
  va_list arguments;
  va_start(arguments, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_arch_prctl && a[0] == ASK) return 0;
  if (number == SYS_arch_prctl && a[0] == MAY) return *(uint64_t*)a[1] = TILE_STATE, 0;
  return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

// Overwrites the cpuid instructions at these places, so that they are answered here. Returns 0 on success.
int pretend_tiles(uint8_t** places, int count) {
  errors = dup(2);
  for (int i = 0; i < count; ++i) {
    if (places[i][0] != (CPUID & 255) || places[i][1] != CPUID >> 8) return 1;
    if (writable(places[i])) return 2;
    places[i][1] = REFUSED >> 8;
  }
  struct sigaction to = {.sa_sigaction = refused, .sa_flags = SA_SIGINFO | SA_NODEFER};
  return sigaction(SIGILL, &to, NULL) ? 3 : 0;
}
