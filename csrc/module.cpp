// The Python module megarl._C: raw pointers as integers in, nothing checked here (megarl/ops does), no GIL held.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "megarl.h"

namespace py = pybind11;
using Pointer = std::uintptr_t;

namespace {

template <class T>
T* at(Pointer address) {
  return reinterpret_cast<T*>(address);
}

uint64_t digest(Pointer data, int itemsize, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                uint64_t offset, const std::vector<uint64_t>& steps, int threads) {
  return megarl_digest(at<void>(data), itemsize, static_cast<int>(sizes.size()), sizes.data(), strides.data(), offset,
                       steps.data(), threads);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "megarl's kernels on the CPU";
  using release = py::call_guard<py::gil_scoped_release>;

  py::class_<MegarlLogits>(m, "Logits")
      .def(py::init([](Pointer data, int dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t vocab_start,
                       int64_t valid_cols, float temperature) {
             return MegarlLogits{at<void>(data), dtype, rows, cols, row_stride, vocab_start, valid_cols, temperature};
           }),
           py::kw_only(), py::arg("data"), py::arg("dtype"), py::arg("rows"), py::arg("cols"), py::arg("row_stride"),
           py::arg("vocab_start"), py::arg("valid_cols"), py::arg("temperature"));
  m.attr("FLOAT32") = static_cast<int>(MEGARL_F32);
  m.attr("BFLOAT16") = static_cast<int>(MEGARL_BF16);
  m.attr("FLOAT16") = static_cast<int>(MEGARL_F16);

  m.def("logprob_local", [](const MegarlLogits& x, Pointer targets, Pointer stats, int threads) {
    megarl_logprob_local(&x, at<int64_t>(targets), at<float>(stats), threads);
  }, release());
  m.def("logprob_combine", [](Pointer stats, int64_t shards, int64_t rows, Pointer targets, Pointer logp,
                              Pointer entropy, Pointer norm) {
    megarl_logprob_combine(at<float>(stats), shards, rows, at<int64_t>(targets), at<float>(logp), at<float>(entropy),
                           at<float>(norm));
  }, release());
  m.def("logprob_backward", [](const MegarlLogits& x, Pointer targets, Pointer norm, Pointer entropy,
                               Pointer grad_logp, Pointer grad_entropy, Pointer out, int64_t out_stride, int threads) {
    megarl_logprob_backward(&x, at<int64_t>(targets), at<float>(norm), at<float>(entropy), at<float>(grad_logp),
                            at<float>(grad_entropy), at<void>(out), out_stride, threads);
  }, release());
  m.def("gae", [](Pointer rewards, Pointer values, Pointer cu, int64_t sequences, Pointer bootstrap, double gamma,
                  double lam, Pointer advantages, Pointer returns, int threads) {
    megarl_gae(at<float>(rewards), at<float>(values), at<int64_t>(cu), sequences, at<float>(bootstrap), gamma, lam,
               at<float>(advantages), at<float>(returns), threads);
  }, release());
  m.def("digest", &digest, release());
  m.def("isa", [] { return std::string(megarl_isa()); }, "Instruction set of the kernels in use.");
  m.def("use_isa", [](const std::string& name) { return megarl_use_isa(name.c_str()); },
        "Choose the instruction set (tests); False where this machine or build does not have it.");
}
