// Runs a model that `hf-cpu-accel export --aot` wrote: no Python, no transformers.
//
//   run_model MODEL.pt2 --ops _C.abi3.so --inputs INPUTS.pt [--outputs OUTPUTS.pt] [--threads N] [--repeat N]
//
// INPUTS.pt is saved with torch.save({name: tensor}). torch.load(OUTPUTS.pt) returns the outputs as a tuple, in the order of the printout.
// The library of ops is part of the installed package:
// python -c "from hf_cpu_accel import extension; print(extension.status().path)"
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

struct Options {
  std::string model, ops, inputs, outputs;
  int threads = 0, repeat = 1;
};

constexpr const char* usage =
    "usage: run_model MODEL.pt2 --ops LIBRARY.so --inputs INPUTS.pt [--outputs OUTPUTS.pt] [--threads N] [--repeat N]";

int positive(const std::string& option, const std::string& value) {
  char* end = nullptr;
  const long number = std::strtol(value.c_str(), &end, 10);
  if (*end != '\0' || number < 1 || number > 1 << 20)
    throw std::invalid_argument(option + " " + value + ": expected a whole number from 1 to 1048576");
  return static_cast<int>(number);
}

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      if (!options.model.empty()) throw std::invalid_argument("expected one MODEL.pt2, got " + options.model + " and " + name);
      options.model = name;
      continue;
    }
    if (++i == argc) throw std::invalid_argument(name + " has no value\n" + usage);
    if (name == "--ops") options.ops = argv[i];
    else if (name == "--inputs") options.inputs = argv[i];
    else if (name == "--outputs") options.outputs = argv[i];
    else if (name == "--threads") options.threads = positive(name, argv[i]);
    else if (name == "--repeat") options.repeat = positive(name, argv[i]);
    else throw std::invalid_argument(name + " is unknown\n" + usage);
  }
  if (options.model.empty() || options.ops.empty() || options.inputs.empty()) throw std::invalid_argument(usage);
  return options;
}

// The ops register themselves when their library is loaded. Loading is lazy, because the library has a function that needs Python.
void load_ops(const std::string& library) {
  if (!dlopen(library.c_str(), RTLD_LAZY | RTLD_GLOBAL)) throw std::runtime_error(std::string("cannot load the ops: ") + dlerror());
  const auto run_together = c10::Dispatcher::singleton().findSchema({"hf_cpu_accel::run_together", ""});
  if (!run_together) throw std::runtime_error(library + " has no ops of hf_cpu_accel; pass extension.status().path to --ops");
  torch::jit::Stack stack{at::get_parallel_info().find("ATen parallel backend: OpenMP") != std::string::npos};
  run_together->callBoxed(stack);
}

std::vector<char> bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the elements of a JSON list of strings. The names that export_aot writes contain no quotation marks.
std::vector<std::string> names_of(const std::string& list) {
  std::vector<std::string> names;
  for (size_t open = list.find('"'); open != std::string::npos;) {
    const size_t close = list.find('"', open + 1);
    names.push_back(list.substr(open + 1, close - open - 1));
    open = list.find('"', close + 1);
  }
  return names;
}

std::vector<at::Tensor> inputs_of(const std::string& path, const std::vector<std::string>& names) {
  const c10::IValue saved = torch::jit::pickle_load(bytes_of(path));
  if (!saved.isGenericDict()) throw std::runtime_error(path + " contains no dictionary; write it with torch.save({name: tensor})");
  const auto dictionary = saved.toGenericDict();
  std::vector<at::Tensor> inputs;
  for (const std::string& name : names) {
    const auto entry = dictionary.find(name);
    if (entry == dictionary.end() || !entry->value().isTensor()) throw std::runtime_error(path + " has no tensor " + name);
    inputs.push_back(entry->value().toTensor());
  }
  return inputs;
}

void print(const std::string& name, const at::Tensor& tensor) {
  std::cout << name << " " << tensor.dtype() << tensor.sizes();
  const at::Tensor values = tensor.reshape({-1}).to(at::kDouble);
  std::cout << "  first";
  for (int64_t i = 0; i < std::min<int64_t>(values.numel(), 4); ++i) std::cout << " " << values[i].item<double>();
  std::cout << "  sum " << values.sum().item<double>() << "\n";
}

int run(const Options& options) {
  if (options.threads > 0) at::set_num_threads(options.threads);
  load_ops(options.ops);
  if (!std::ifstream(options.model)) throw std::runtime_error("cannot read " + options.model);
  torch::inductor::AOTIModelPackageLoader loader(options.model);
  const auto metadata = loader.get_metadata();
  if (!metadata.count("hf_cpu_accel")) throw std::runtime_error(options.model + " was not written by hf-cpu-accel export --aot");
  const std::vector<std::string> names = names_of(metadata.at("outputs"));
  const std::vector<at::Tensor> inputs = inputs_of(options.inputs, names_of(metadata.at("inputs")));

  c10::InferenceMode no_gradients;
  std::vector<at::Tensor> outputs;
  std::vector<double> milliseconds;
  for (int i = 0; i < options.repeat; ++i) {
    const auto start = std::chrono::steady_clock::now();
    outputs = loader.run(inputs);
    milliseconds.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
  }
  if (outputs.size() != names.size())
    throw std::runtime_error("the model returned " + std::to_string(outputs.size()) + " outputs, but its file names " +
                             std::to_string(names.size()) + "; export it again");

  for (size_t i = 0; i < outputs.size(); ++i) print(names[i], outputs[i]);
  std::sort(milliseconds.begin(), milliseconds.end());
  std::cout << milliseconds[milliseconds.size() / 2] << " ms, median of " << milliseconds.size() << " calls, " << at::get_num_threads()
            << " threads\n";
  if (!options.outputs.empty()) {
    const std::vector<char> bytes =
        torch::jit::pickle_save(c10::ivalue::Tuple::create(std::vector<c10::IValue>(outputs.begin(), outputs.end())));
    std::ofstream file(options.outputs, std::ios::binary);
    if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()))) throw std::runtime_error("cannot write " + options.outputs);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(options_of(argc, argv));
  } catch (const c10::Error& error) {
    std::cerr << "run_model: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "run_model: " << error.what() << "\n";
    return 1;
  }
}
