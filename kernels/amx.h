// AMX's tiles: eight of them hold 16 rows of 64 bytes each. Products of bfloat16 are summed in float32, those of bytes in
// int32.
//
// The compiler is told nothing of tiles. Whether there are any is found when the kernel runs.

#if defined(__AVX512BF16__) && defined(__linux__) && !defined(NO_AMX)
#define AMX

#include <cstdlib>
#include <sys/syscall.h>
#include <unistd.h>

namespace amx {

constexpr int64_t ROWS = 16, COLUMNS = 16;  // of sums in a tile
template <typename Number>
constexpr int64_t TERMS = 64 / sizeof(Number);  // numbers in a row of a tile of factors, bf16 or i8

// Whether ONEDNN_MAX_CPU_ISA, which keeps oneDNN from some instructions, names a set of them without tiles.
inline bool unwanted() {
  const char* most = std::getenv("ONEDNN_MAX_CPU_ISA");
  return most && (std::strstr(most, "AVX") || std::strstr(most, "SSE")) && !std::strstr(most, "AMX");
}

// Whether tiles may be used. Linux, which has to be asked once, refuses where the CPU has none.
inline bool allowed() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool granted = !unwanted() && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return granted;
}

// A thread multiplies on tiles while one of these lives. Libraries set up tiles in their own ways, so that none of
// theirs may run meanwhile.
class InUse {
 public:
  InUse() {
    if (!allowed()) return;
    struct {
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } whole;
    __asm__ volatile("ldtilecfg\t%0" ::"m"(whole));
  }
  ~InUse() {
    if (allowed()) __asm__ volatile("tilerelease");
  }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
};

// Strides are in bytes.
template <int TILE>
inline void load(const void* rows, int64_t stride) {
  __asm__ volatile("tileloadd\t(%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "n"(TILE) : "memory");
}

template <int TILE>
inline void store(void* rows, int64_t stride) {
  __asm__ volatile("tilestored\t%%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "n"(TILE) : "memory");
}

template <int TILE>
inline void clear() {
  __asm__ volatile("tilezero\t%%tmm%c0" ::"n"(TILE));
}

// Tile SUMS += tile A [16, TERMS] times tile B [TERMS, 16], of which each row holds, for 16 columns, the neighbouring rows'
// numbers that fill four bytes: pairs of bf16, fours of i8.
template <typename Number, int SUMS, int A, int B>
inline void multiply() {
  if constexpr (std::is_same_v<Number, bf16>)
    __asm__ volatile("tdpbf16ps\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(SUMS), "n"(A), "n"(B));
  else
    __asm__ volatile("tdpbssd\t%%tmm%c2, %%tmm%c1, %%tmm%c0" ::"n"(SUMS), "n"(A), "n"(B));
}

}  // namespace amx

#endif
