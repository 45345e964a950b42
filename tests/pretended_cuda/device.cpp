// A CUDA device that is not there, for a CPU-only torch: its memory is the host's, its kernels are the CPU's.
// Mixing devices is refused as CUDA kernels refuse it, and what would make the host wait for a device is counted.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>
#include <iostream>
#include <mutex>
#include <set>
#include <unordered_set>
using namespace c10;
using at::Tensor;

static const Device DEV(DeviceType::CUDA, 0);
static std::mutex mtx;
static std::set<const void*> pinned;

// ---- memory ----
struct CudaAlloc final : Allocator {
  static void del(void* p) { free(p); }
  DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) { if (posix_memalign(&p, 64, n)) TORCH_CHECK(false, "pretended_cuda: out of memory"); }
    return {p, p, &del, DEV};
  }
  DeleterFnPtr raw_deleter() const override { return &del; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
};
static CudaAlloc cudaAlloc;
struct PinnedAlloc final : Allocator {
  static void del(void* p) { { std::lock_guard<std::mutex> g(mtx); pinned.erase(p); } free(p); }
  DataPtr allocate(size_t n) override {
    void* p = nullptr;
    if (n) { if (posix_memalign(&p, 64, n)) TORCH_CHECK(false, "pretended_cuda: out of memory");
      std::lock_guard<std::mutex> g(mtx); pinned.insert(p); }
    return {p, p, &del, Device(DeviceType::CPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &del; }
  void copy_data(void* d, const void* s, size_t n) const override { memcpy(d, s, n); }
};
static PinnedAlloc pinnedAlloc;
static bool is_pinned_storage(const Tensor& t) {
  std::lock_guard<std::mutex> g(mtx);
  return t.has_storage() && pinned.count(t.storage().data());
}

// ---- guard and hooks ----
struct G final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEV; }
  Device getDevice() const override { return DEV; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, DEV); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, DEV); }
  Stream getNewStream(Device, int priority = 0) const override { (void)priority; return Stream(Stream::DEFAULT, DEV); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, DEV); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, G)

static at::Generator& gen() { static at::Generator g = at::detail::createCPUGenerator(0); return g; }
namespace at {
struct FakeHooks final : CUDAHooksInterface {
  FakeHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  void deviceSynchronize(DeviceIndex) const override {}
  bool isPinnedPtr(const void* p) const override { std::lock_guard<std::mutex> g(mtx); return pinned.count(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinnedAlloc; }
  Allocator* getCUDADeviceAllocator() const override { return &cudaAlloc; }
  Device getDeviceFromPtr(void*) const override { return DEV; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return gen(); }
  Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(0); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, FakeHooks)
} // namespace at
static struct Init { Init() { SetAllocator(DeviceType::CUDA, &cudaAlloc); } } init_;

// ---- aliases ----
static DispatchKeySet keys(DeviceType t) {
  return t == DeviceType::CUDA ? DispatchKeySet(DispatchKey::CUDA) : DispatchKeySet(DispatchKey::CPU);
}
static Tensor with_device(const Tensor& t, Device d) {
  auto st = t.storage();
  auto* keep = new Storage(st);
  DataPtr p(st.mutable_data(), keep, [](void* k) { delete static_cast<Storage*>(k); }, d);
  Storage s(Storage::use_byte_size_t(), st.nbytes(), std::move(p),
            d.is_cuda() ? static_cast<Allocator*>(&cudaAlloc) : GetAllocator(DeviceType::CPU), true);
  auto out = at::detail::make_tensor<TensorImpl>(std::move(s), keys(d.type()), t.dtype());
  auto* i = out.unsafeGetTensorImpl();
  i->set_storage_offset(t.storage_offset());
  i->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.is_conj()) out._set_conj(true);
  if (t.is_neg()) out._set_neg(true);
  return out;
}
static Tensor to_cpu(const Tensor& t) { return with_device(t, Device(DeviceType::CPU)); }
static Tensor to_cuda(const Tensor& t) { return with_device(t, DEV); }

// ---- what is noticed ----
static std::atomic<int64_t> calls{0};
static c10::OperatorName* note_name = nullptr;
static void note(const std::string& kind, const std::string& op) {
  static auto h = Dispatcher::singleton().findSchemaOrThrow("pretended_cuda::note", "");
  // into Python, where the stack is known
  auto typed = h.typed<void(std::string, std::string)>();
  (void)typed;
  torch::jit::Stack s; s.emplace_back(kind); s.emplace_back(op);
  h.callBoxed(&s);
}

static bool indices_may_be_on_host(const std::string& n) {
  static const std::unordered_set<std::string> ok = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return ok.count(n);
}

static void fallback(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  calls++;
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  auto args = torch::jit::last(stack, n);
  std::vector<std::pair<Tensor, Tensor>> made;  // device tensor, alias on the host
  bool has_cpu = false; std::string which;
  auto conv = [&](const Tensor& t) -> Tensor {
    if (!t.defined()) return t;
    if (t.is_cuda()) {
      for (auto& m : made) if (m.first.is_same(t)) return m.second;
      auto c = to_cpu(t); made.emplace_back(t, c); return c;
    }
    if (t.device().is_cpu() && t.dim() > 0) { has_cpu = true; which = c10::str(t.sizes(), " ", t.dtype()); }
    return t;
  };
  const size_t base = stack->size() - n;
  for (size_t i = 0; i < n; i++) {
    IValue& v = (*stack)[base + i];
    if (v.isTensor()) v = IValue(conv(v.toTensor()));
    else if (v.isTensorList()) { auto l = v.toTensorVector(); std::vector<Tensor> o; for (auto& t : l) o.push_back(conv(t)); v = IValue(o); }
    else if (v.isOptionalTensorList()) {
      auto l = v.toOptionalTensorList(); c10::List<std::optional<Tensor>> o;
      for (size_t k = 0; k < l.size(); k++) { std::optional<Tensor> t = l.get(k); o.push_back(t && t->defined() ? std::optional<Tensor>(conv(*t)) : std::nullopt); }
      v = IValue(o);
    }
    else if (v.isList() && v.toListRef().size() && v.toListRef()[0].isTensorList()) {
      c10::List<std::vector<Tensor>> o;
      for (auto& inner : v.toListRef()) { auto l = inner.toTensorVector(); std::vector<Tensor> x; for (auto& t : l) x.push_back(conv(t)); o.push_back(x); }
      v = IValue(o);
    }
    else if (v.isDevice() && v.toDevice().is_cuda()) v = IValue(Device(DeviceType::CPU));
    else if (schema.arguments()[i].name() == "pin_memory") v = IValue();
    else if (schema.arguments()[i].name() == "generator" && v.isNone()) v = IValue(gen());
  }
  (void)args;
  if (has_cpu && !made.empty()) {
    if (!indices_may_be_on_host(schema.name()))
      TORCH_CHECK(false, "pretended_cuda: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu (", schema.name(), ", host tensor ", which, ")");
    note("host_index", schema.name());
  }
  static const std::unordered_set<std::string> waits = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::is_nonzero", "aten::bincount", "aten::_linalg_check_errors", "aten::histc"};
  if (waits.count(schema.name())) note("sync", schema.name());
  if (schema.name() == "aten::repeat_interleave" && schema.overload_name() == "Tensor" && (*stack)[base + 1].isNone()) note("sync", "aten::repeat_interleave without output_size");
  if (schema.name() == "aten::index" || schema.name() == "aten::index_put_" || schema.name() == "aten::_index_put_impl_") {
    auto l = (*stack)[base + 1].toOptionalTensorList();
    // One value behind one mask is filled in, without counting where.
    const bool fills = schema.name() != "aten::index" && l.size() == 1 && (*stack)[base + 2].toTensor().numel() == 1;
    if (!fills) for (size_t k = 0; k < l.size(); k++) { std::optional<Tensor> t = l.get(k); if (t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte)) note("sync", schema.name() + " by a mask"); }
  }
  if (at::globalContext().deterministicAlgorithms() && !at::globalContext().deterministicAlgorithmsWarnOnly()) {
    static const std::unordered_set<std::string> varying = {"aten::cumsum", "aten::histc", "aten::put_", "aten::kthvalue", "aten::_ctc_loss", "aten::nll_loss2d_forward", "aten::grid_sampler_2d_backward"};
    bool floating = false;
    for (auto& m : made) floating |= at::isFloatingType(m.first.scalar_type());
    TORCH_CHECK(!(floating && varying.count(schema.name())), schema.name(), " does not have a deterministic implementation on CUDA");
  }
  op.callBoxed(stack);
  const auto r = schema.returns().size();
  const size_t rb = stack->size() - r;
  auto back = [&](const Tensor& t) -> Tensor {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& m : made) if (m.second.is_same(t)) return m.first;
    for (auto& m : made) if (m.second.has_storage() && t.has_storage() && m.second.storage().is_alias_of(t.storage()) && t.numel()) {
      // a view: of the device tensor's storage
      auto out = at::detail::make_tensor<TensorImpl>(Storage(m.first.storage()), DispatchKeySet(DispatchKey::CUDA), t.dtype());
      out.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
      out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
      return out;
    }
    return to_cuda(t);
  };
  for (auto& m : made)  // what was resized
    if (!m.first.sizes().equals(m.second.sizes()) || m.first.storage().data() != m.second.storage().data()) {
      auto c = to_cuda(m.second);
      m.first.unsafeGetTensorImpl()->set_storage_keep_dtype(c.storage());
      m.first.unsafeGetTensorImpl()->set_storage_offset(c.storage_offset());
      m.first.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides());
    }
  for (size_t i = 0; i < r; i++) {
    IValue& v = (*stack)[rb + i];
    if (v.isTensor()) v = IValue(back(v.toTensor()));
    else if (v.isTensorList()) { auto l = v.toTensorVector(); std::vector<Tensor> o; for (auto& t : l) o.push_back(back(t)); v = IValue(o); }
    else if (v.isList() && v.toListRef().size() && v.toListRef()[0].isTensorList()) {
      c10::List<std::vector<Tensor>> o;
      for (auto& inner : v.toListRef()) { auto l = inner.toTensorVector(); std::vector<Tensor> x; for (auto& t : l) x.push_back(back(t)); o.push_back(x); }
      v = IValue(o);
    }
  }
}
static void fallback_plain(const OperatorHandle& op, torch::jit::Stack* stack) { fallback(op, DispatchKeySet(DispatchKey::CUDA), stack); }

static Tensor empty_mf(SymIntArrayRef size, std::optional<ScalarType> dt, std::optional<Layout>, std::optional<Device>, std::optional<bool>, std::optional<MemoryFormat> mf) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &cudaAlloc, DispatchKeySet(DispatchKey::CUDA), dt.value_or(at::get_default_dtype_as_scalartype()), mf);
}
static Tensor empty_str(SymIntArrayRef size, SymIntArrayRef stride, std::optional<ScalarType> dt, std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &cudaAlloc, DispatchKeySet(DispatchKey::CUDA), dt.value_or(at::get_default_dtype_as_scalartype()));
}
static Tensor as_str(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride, std::optional<SymInt> off) {
  auto out = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(self.storage()), self.key_set(), self.dtype());
  auto* i = out.unsafeGetTensorImpl();
  i->set_storage_offset(off ? off->guard_int(__FILE__, __LINE__) : self.storage_offset());
  i->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return out;
}
static Tensor view(const Tensor& self, SymIntArrayRef ssize) {
  auto size = C10_AS_INTARRAYREF_SLOW(ssize);
  auto inferred = at::infer_size_dv(size, self.numel());
  auto st = at::detail::computeStride(self.sizes(), self.strides(), inferred);
  TORCH_CHECK(st.has_value(), "view size is not compatible with input tensor's size and stride");
  auto out = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(self.storage()), self.key_set(), self.dtype());
  auto* i = out.unsafeGetTensorImpl();
  i->set_storage_offset(self.storage_offset());
  i->set_sizes_and_strides(inferred, *st);
  return out;
}
static Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) { return as_str(self, size, stride, std::nullopt); }
static Tensor unfold(const Tensor& self, int64_t d, int64_t size, int64_t step) {
  auto c = to_cpu(self).unfold(d, size, step);
  auto out = at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, Storage(self.storage()), self.key_set(), self.dtype());
  out.unsafeGetTensorImpl()->set_storage_offset(c.storage_offset());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides());
  return out;
}
static const Tensor& resize(const Tensor& self, SymIntArrayRef ssize, std::optional<MemoryFormat>) {
  auto size = C10_AS_INTARRAYREF_SLOW(ssize);
  auto* i = self.unsafeGetTensorImpl();
  i->set_sizes_contiguous(size);
  size_t need = (i->storage_offset() + i->numel()) * self.itemsize();
  if (need > self.storage().nbytes()) {
    auto p = cudaAlloc.allocate(need);
    if (self.storage().nbytes()) memcpy(p.get(), self.storage().data(), self.storage().nbytes());
    i->unsafe_storage().set_data_ptr_noswap(std::move(p)); i->unsafe_storage().set_nbytes(need);
  }
  return self;
}
static Tensor& set_so(Tensor& self, Storage s, SymInt off, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* i = self.unsafeGetTensorImpl();
  i->set_storage_keep_dtype(s); i->set_storage_offset(off.guard_int(__FILE__, __LINE__));
  auto sz = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.size() || !sz.size()) i->set_sizes_and_strides(sz, C10_AS_INTARRAYREF_SLOW(stride)); else i->set_sizes_contiguous(sz);
  return self;
}
static Tensor& set_s(Tensor& self, Storage s) {
  auto* i = self.unsafeGetTensorImpl(); int64_t n = s.nbytes() / self.itemsize();
  i->set_storage_keep_dtype(s); i->set_storage_offset(0); i->set_sizes_contiguous({n}); return self;
}
static Tensor& set_t(Tensor& self, const Tensor& o) {
  auto* i = self.unsafeGetTensorImpl(); i->set_storage_keep_dtype(o.storage()); i->set_storage_offset(o.storage_offset());
  i->set_sizes_and_strides(o.sizes(), o.strides()); return self;
}
static Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (!src.numel() || !self.numel()) return self;
  const bool down = src.is_cuda() && !self.is_cuda(), up = self.is_cuda() && !src.is_cuda();
  if (src.is_meta() || self.is_meta()) return self;
  if (down || up) {
    const Tensor& host = down ? self : src;
    bool pin = is_pinned_storage(host);
    if (!(non_blocking && pin)) note(down ? "sync_d2h" : "sync_h2d", c10::str(host.sizes(), " ", host.dtype(), pin ? " pinned" : " pageable", non_blocking ? " non_blocking" : ""));
    else note(down ? "async_d2h" : "async_h2d", c10::str(host.sizes(), " ", host.dtype()));
  }
  auto d = self.is_cuda() ? to_cpu(self) : self; auto s = src.is_cuda() ? to_cpu(src) : src;
  d.copy_(s);
  return self;
}
static Scalar local_scalar(const Tensor& self) { note("sync", "aten::_local_scalar_dense"); return at::_local_scalar_dense(to_cpu(self)); }
static Tensor record_stream_dummy(const Tensor& t) { return t; }

static void record_stream(Tensor&, Stream) {}

static void hook_c10d() {
  static std::vector<RegistrationHandleRAII> kept;
  for (auto& name : Dispatcher::singleton().getAllOpNames())
    if (name.name.rfind("c10d::", 0) == 0) {
      auto op = Dispatcher::singleton().findOp(name);
      if (!op) continue;
      kept.push_back(Dispatcher::singleton().registerImpl(name, DispatchKey::CUDA, KernelFunction::makeFromBoxedFunction<&fallback_plain>(), std::nullopt, nullptr, "pretended_cuda"));
    }
}
TORCH_LIBRARY(pretended_cuda, m) {
  m.def("hook_c10d() -> ()", []() { hook_c10d(); });
  m.def("note(str kind, str op) -> ()");
  m.def("host(Tensor x) -> Tensor", [](Tensor x) { return x.is_cuda() ? to_cpu(x) : x; });
  m.def("rng_state() -> Tensor", []() { std::lock_guard<std::mutex> g(gen().mutex()); return gen().get_state(); });
  m.def("set_rng_state(Tensor x) -> ()", [](Tensor x) { std::lock_guard<std::mutex> g(gen().mutex()); gen().set_state(x); });
  m.def("seed(int s) -> ()", [](int64_t s) { std::lock_guard<std::mutex> g(gen().mutex()); gen().set_current_seed(s); });
  m.def("calls() -> int", []() -> int64_t { return calls.load(); });
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback_plain>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_mf);
  m.impl("empty_strided", empty_str);
  m.impl("as_strided", as_str);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_so);
  m.impl("set_.source_Storage", set_s);
  m.impl("set_.source_Tensor", set_t);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
}
