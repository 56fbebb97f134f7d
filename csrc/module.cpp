// The Python module megarl._C: raw pointers as integers in, nothing checked here (megarl/ops does), no GIL held.
// Its submodules `cpu` and, where built, `cuda` have the same functions; the last argument is the number of threads or
// the stream.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "megarl.h"

#ifndef MEGARL_MODULE
#define MEGARL_MODULE _C
#endif
#ifndef MEGARL_CUDA_STATE
#define MEGARL_CUDA_STATE "of unknown origin"
#endif

namespace py = pybind11;
using Pointer = std::uintptr_t;

namespace {

template <class T>
T* at(Pointer address) {
  return reinterpret_cast<T*>(address);
}

struct Cpu {
  using How = int;  // threads
  static int how(How threads) { return threads; }
#define MEGARL_CALL(function, ...) megarl_cpu_##function(__VA_ARGS__)
#include "module_functions.inc"
#undef MEGARL_CALL
};

#ifdef MEGARL_CUDA
void check(const char* function, int status) {
  if (status) throw std::runtime_error(std::string("CUDA kernel ") + function + ": " + megarl_cuda_error(status));
}

struct Cuda {
  using How = Pointer;  // stream
  static void* how(How stream) { return at<void>(stream); }
#define MEGARL_CALL(function, ...) check(#function, megarl_cuda_##function(__VA_ARGS__))
#include "module_functions.inc"
#undef MEGARL_CALL
};
#endif

template <class Where>
void define(py::module_ m) {
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("logprob_local", &Where::logprob_local, release());
  m.def("logprob_combine", &Where::logprob_combine, release());
  m.def("logprob_backward", &Where::logprob_backward, release());
  m.def("gae", &Where::gae, release());
  m.def("policy", &Where::policy, release());
  m.def("digests", &Where::digests, release());
}

}  // namespace

PYBIND11_MODULE(MEGARL_MODULE, m) {
  m.doc() = "megarl's kernels";

  // module_local: tests load several builds into one process.
  py::class_<MegarlLogits>(m, "Logits", py::module_local())
      .def(py::init([](Pointer data, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t vocab_start,
                       int64_t vocab_size, double temperature) {
             return MegarlLogits{at<void>(data), dtype,      rows, cols, row_stride, vocab_start, vocab_size,
                                 static_cast<real>(temperature)};
           }),
           py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("row_stride"),
           py::arg("vocab_start"), py::arg("vocab_size"), py::arg("temperature"));
  py::class_<MegarlPolicy>(m, "Policy", py::module_local())
      .def(py::init([](int importance, int objective, int kl, int aggregation, double clip_low, double clip_high,
                       double dual_clip, double kl_coef, double entropy_coef, double scale) {
             return MegarlPolicy{importance, objective, kl,      aggregation,  clip_low,
                                 clip_high,  dual_clip, kl_coef, entropy_coef, scale};
           }),
           py::kw_only(), py::arg("importance"), py::arg("objective"), py::arg("kl"), py::arg("aggregation"),
           py::arg("clip_low"), py::arg("clip_high"), py::arg("dual_clip"), py::arg("kl_coef"),
           py::arg("entropy_coef"), py::arg("scale"));
  m.attr("REAL") = sizeof(real) == 4 ? "float32" : "float64";
  m.attr("REAL_DTYPE") = static_cast<int>(MEGARL_REAL_DTYPE);
  m.attr("BFLOAT16") = static_cast<int>(MEGARL_BF16);
  m.attr("FLOAT16") = static_cast<int>(MEGARL_F16);
  m.attr("POLICY_SUMS") = MEGARL_POLICY_SUMS;
  m.attr("DIGEST_BOX_BYTES") = MEGARL_DIGEST_BOX_BYTES;
  m.def("digest_table", [](const std::vector<int64_t>& boxes, int64_t count, Pointer table) {
    return megarl_digest_table(boxes.data(), count, at<void>(table));
  }, "Write a table of boxes for `digests` into host memory; the pieces of work in it.");
  m.def("gae_slots", &megarl_gae_slots, "Doubles of scratch for `gae` over (sequences, tokens) on a GPU.");

  define<Cpu>(m.def_submodule("cpu", "host memory; the last argument is the number of threads"));
#ifdef MEGARL_CUDA
  define<Cuda>(m.def_submodule("cuda", "device memory; the last argument is the CUDA stream"));
#endif
  m.attr("CUDA_STATE") = MEGARL_CUDA_STATE;
  m.def("isa", [] { return std::string(megarl_isa()); }, "Instruction set of the CPU kernels in use.");
  m.def("use_isa", [](const std::string& name) { return megarl_use_isa(name.c_str()); },
        "Choose the instruction set (tests); False where this machine or build does not have it.");
}
