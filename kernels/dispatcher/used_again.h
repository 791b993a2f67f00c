// Memory that is used again: what one tensor gives back, the next one gets.
//
// The C library returns large blocks to the system at once, and the system zeroes each page of them again when the next
// tensor touches it. For a tensor that is made anew at each step, that takes longer than writing it. Huge pages, which
// take fewer faults, were tried as well: the first touch took 0.2 to 4 times that of small ones, and later steps gained
// at most 5 %.

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>

#include <cstdlib>
#include <deque>
#include <mutex>

namespace {

class UsedAgain final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    Block* block = find(bytes);
    return {block->memory, block, &UsedAgain::give_back, c10::Device(c10::kCPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  // Tensors may outlive all else, so this one is never destroyed.
  static UsedAgain& memory() {
    static auto* const only = new UsedAgain;
    return *only;
  }

 private:
  struct Block {
    void* memory;
    size_t bytes;
  };

  static constexpr size_t LEAST_ROOM = size_t{2} << 20, CACHE_LINE = 64;

  std::mutex mutex;
  std::deque<Block*> free;  // the one that was given back first in front
  size_t bytes_in_use = 0, bytes_free = 0;

  // A block that was given back, or else a new one.
  Block* find(size_t bytes) {
    if (Block* block = take(bytes)) return block;
    void* memory = nullptr;
    const size_t room = with_room(bytes);
    TORCH_CHECK(posix_memalign(&memory, CACHE_LINE, room) == 0, "mla::grow_cache: no memory for ", room, " bytes");
    const std::lock_guard<std::mutex> lock(mutex);
    bytes_in_use += room;
    return new Block{memory, room};
  }

  // The smallest free block that suffices and is not twice too large, null if there is none.
  Block* take(size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    auto best = free.end();
    for (auto it = free.begin(); it != free.end(); ++it) {
      const bool fits = bytes <= (*it)->bytes && (*it)->bytes / 2 <= bytes;
      if (fits && (best == free.end() || (*it)->bytes < (*best)->bytes)) best = it;
    }
    if (best == free.end()) return nullptr;
    Block* block = *best;
    free.erase(best);
    bytes_free -= block->bytes;
    bytes_in_use += block->bytes;
    return block;
  }

  // At most an eighth more, or `LEAST_ROOM`, so that the block also suffices for the next steps. Pages that nothing
  // touches take no memory.
  static size_t with_room(size_t bytes) {
    size_t step = LEAST_ROOM;
    while (step * 16 <= bytes) step *= 2;
    return (bytes / step + 1) * step;
  }

  static void give_back(void* block) { memory().keep(static_cast<Block*>(block)); }

  // No more is kept than is in use, so that nothing is left once the last tensor is gone.
  void keep(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex);
    bytes_in_use -= block->bytes;
    bytes_free += block->bytes;
    free.push_back(block);
    while (bytes_free > bytes_in_use) {
      Block* oldest = free.front();
      free.pop_front();
      bytes_free -= oldest->bytes;
      std::free(oldest->memory);
      delete oldest;
    }
  }
};

}  // namespace
