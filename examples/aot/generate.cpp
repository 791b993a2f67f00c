// Generates text with the package of export.py, without Python or mla_compile: only libtorch, and kernels in libmla.so.
//
// Build: cmake -S examples/aot -B out/aot/build -DCMAKE_PREFIX_PATH=$(python -c "import torch; print(torch.utils.cmake_prefix_path)")
//        cmake --build out/aot/build
// Run:   out/aot/build/generate out/aot/model.pt2 out/aot/libmla.so out/aot/pieces.txt TOKENS PROMPT_TOKEN...

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <dlfcn.h>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

namespace {

std::vector<std::string> read_pieces(const std::string& path) {
  std::vector<std::string> pieces;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::string piece;
    for (size_t i = 0; i + 1 < line.size(); i += 2) {
      piece.push_back(static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16)));
    }
    pieces.push_back(piece);
  }
  return pieces;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    std::cerr << "usage: generate MODEL.pt2 LIBMLA.so PIECES.txt TOKENS PROMPT_TOKEN...\n";
    return 2;
  }
  if (!dlopen(argv[2], RTLD_NOW)) {  // registers the ops that the package calls
    std::cerr << dlerror() << "\n";
    return 1;
  }
  torch::inductor::AOTIModelPackageLoader model(argv[1]);
  const auto pieces = read_pieces(argv[3]);
  const int tokens = std::stoi(argv[4]);
  std::vector<int64_t> prompt;
  for (int i = 5; i < argc; ++i) prompt.push_back(std::stoll(argv[i]));

  // Layers and widths of the shipped checkpoint: 5 layers, a latent of 48 and a rope key of 16 per token.
  at::Tensor latents = at::zeros({5, 1, 0, 48}), k_ropes = at::zeros({5, 1, 0, 16});
  at::Tensor ids = at::tensor(prompt, at::kLong).unsqueeze(0);
  for (const auto id : prompt) std::cout << pieces.at(id);
  for (int step = 0; step < tokens; ++step) {
    const auto outputs = model.run({ids, latents, k_ropes});
    ids = outputs[0].argmax(-1, /*keepdim=*/true);
    latents = outputs[1];
    k_ropes = outputs[2];
    std::cout << pieces.at(ids.item<int64_t>()) << std::flush;
  }
  std::cout << "\ncache: " << latents.size(2) << " tokens\n";
}
