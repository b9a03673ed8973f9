#include "extras.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "bindings.h"
#include "lists.h"
#include "pagedkv/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace pagedkv::bindings {
namespace {

constexpr uint8_t kSalt = 1, kAdapter = 2, kMedia = 3, kEmbeddings = 4, kFirstOwn = 128;
constexpr size_t kLongestSalt = 128, kDigestBytes = 32;
constexpr int64_t kLastPosition = std::numeric_limits<int32_t>::max();

/// A dataclass of pagedkv/extras.py. Its fields are slots, which are read where they lie: to ask
/// the object for three of them takes as long as to hash a block. Kept for good.
class ExtraClass {
 public:
  ExtraClass(const nb::module_& module, const char* name, std::vector<const char*> fields)
      : type_(nb::object(module.attr(name)).release().ptr()), names_(std::move(fields)) {
    for (const char* field : names_)
      offsets_.push_back(slot_offset(reinterpret_cast<PyTypeObject*>(type_), field));
  }

  bool is_exactly(nb::handle object) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) == type_;
  }
  bool is(nb::handle object) const {
    return PyObject_TypeCheck(object.ptr(), reinterpret_cast<PyTypeObject*>(type_));
  }

  nb::object field(nb::handle object, size_t i) const {
    if (PyObject* value = is_exactly(object) ? slot(object, i) : nullptr) return nb::borrow(value);
    return object.attr(names_[i]);
  }
  /// What an object of exactly this class has in a slot, or null.
  PyObject* slot(nb::handle object, size_t i) const {
    if (offsets_[i] < 0) return nullptr;
    auto* bytes = reinterpret_cast<std::byte*>(object.ptr());
    return *reinterpret_cast<PyObject**>(bytes + offsets_[i]);
  }

 private:
  PyObject* type_;
  std::vector<const char*> names_;
  std::vector<Py_ssize_t> offsets_;
};

struct ExtraClasses {
  nb::module_ module = nb::module_::import_("pagedkv.extras");
  ExtraClass media{module, "Media", {"start", "length", "digest"}};
  ExtraClass adapter{module, "Adapter", {"id", "revision"}};
  ExtraClass embeddings{module, "Embeddings", {"positions", "digest"}};
  ExtraClass extra{module, "Extra", {"tag", "payload"}};

  static const ExtraClasses& get() {
    static const ExtraClasses* classes = new ExtraClasses;  // outlives the interpreter
    return *classes;
  }
};

/// The bytes of bytes or, as UTF-8, of a str, for as long as the object lives; none for anything
/// else and for text that UTF-8 can't express.
std::optional<std::string_view> bytes_of(nb::handle object) {
  if (PyBytes_Check(object.ptr()))
    return std::string_view(PyBytes_AS_STRING(object.ptr()),
                            static_cast<size_t>(PyBytes_GET_SIZE(object.ptr())));
  if (!PyUnicode_Check(object.ptr())) return std::nullopt;
  Py_ssize_t size;
  const char* text = PyUnicode_AsUTF8AndSize(object.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    return std::nullopt;
  }
  return std::string_view(text, static_cast<size_t>(size));
}

/// The same of a field that was checked when its object was made.
std::string_view field_bytes(nb::handle field) {
  if (const auto bytes = bytes_of(field)) return *bytes;
  throw nb::type_error("a field of an extra was replaced by something else");
}

int64_t to_int(nb::handle number) {
  const long long value = PyLong_AsLongLong(number.ptr());
  if (value == -1 && PyErr_Occurred()) nb::raise_python_error();
  return value;
}

/// A number of `num_bytes`, little-endian.
template <size_t num_bytes>
inline std::string_view little_endian(char (&room)[num_bytes], uint64_t number) {
  for (char& byte : room) byte = static_cast<char>(number & 0xff), number >>= 8;
  return {room, num_bytes};
}

/// Collects entries, each as if it were all that its block has; finish() merges them. Most blocks
/// have one entry, and most entries come in the order of the prompt.
class Encoder {
 public:
  Encoder(size_t num_tokens, uint32_t block_size)
      : num_tokens_(static_cast<int64_t>(num_tokens)), block_size_(block_size) {}

  void reserve(size_t num_entries) { blocks_.reserve(num_entries); }

  void add_salt(int64_t position, std::string_view salt) {
    add_scope(static_cast<uint64_t>(position) / block_size_, kSalt, {salt});
  }

  void add_adapter(nb::handle adapter, const ExtraClass& fields) {
    const nb::object id = fields.field(adapter, 0), revision = fields.field(adapter, 1);
    const std::string_view id_bytes = field_bytes(id);
    char length[4];
    add_scope(0, kAdapter,
              {little_endian(length, id_bytes.size()), id_bytes, field_bytes(revision)});
  }

  void add_own(nb::handle extra, const ExtraClass& fields) {
    const nb::object payload = fields.field(extra, 1);
    const int64_t tag = to_int(fields.field(extra, 0));
    if (tag < kFirstOwn ||
        tag > UINT8_MAX)  // the class checks it, but a subclass may do as it likes
      throw UsageError("extras: expected a tag from 128 to 255, got " + std::to_string(tag));
    add_scope(0, static_cast<uint8_t>(tag), {field_bytes(payload)});
  }

  void add_media(nb::handle media, const ExtraClass& fields, size_t index) {
    const int64_t start = to_int(fields.field(media, 0));
    const int64_t end = check_range(start, to_int(fields.field(media, 1)), index);
    const nb::object digest = fields.field(media, 2);
    const std::string_view digest_bytes = field_bytes(digest);
    uint32_t block = static_cast<uint32_t>(start) / block_size_;
    for (int64_t offset = start - int64_t{block} * block_size_; start - offset < end;
         ++block, offset -= block_size_) {
      char place[4];
      little_endian(place, static_cast<uint64_t>(offset));
      char* out = add_entry(block, kMedia, sizeof place + digest_bytes.size(),
                            static_cast<uint32_t>(std::max<int64_t>(offset, 0)));
      out = std::copy_n(place, sizeof place, out);
      if (digest_bytes.size() == kDigestBytes) {  // always; copied without a call
        std::memcpy(out, digest_bytes.data(), kDigestBytes);
      } else {
        std::copy(digest_bytes.begin(), digest_bytes.end(), out);
      }
    }
  }

  void add_embeddings(nb::handle embeddings, const ExtraClass& fields, size_t index) {
    const auto positions = nb::cast<std::vector<int64_t>>(fields.field(embeddings, 0));
    for (int64_t position : positions) check_range(position, 1, index);
    const nb::object digest = fields.field(embeddings, 1);
    for (size_t i = 0, next; i < positions.size(); i = next) {
      const int64_t block = positions[i] / block_size_;
      std::string places;
      char place[2];
      for (next = i; next < positions.size() && positions[next] / block_size_ == block; ++next)
        places += little_endian(place, static_cast<uint64_t>(positions[next] % block_size_));
      add(static_cast<uint32_t>(block), kEmbeddings,
          {little_endian(place, next - i), places, field_bytes(digest)},
          static_cast<uint32_t>(positions[i] % block_size_));
    }
  }

  std::vector<BlockExtras> finish() {
    const auto is_not_before = [](const BlockExtras& a, const BlockExtras& b) {
      return a.block_index >= b.block_index;
    };
    if (std::ranges::adjacent_find(blocks_, is_not_before) != blocks_.end()) merge();
    return std::move(blocks_);
  }

 private:
  static constexpr size_t kHeadBytes = 5;  // the tag and the length of what follows

  void add(uint32_t block, uint8_t tag, std::initializer_list<std::string_view> parts,
           uint32_t first_offset) {
    size_t num_bytes = 0;
    for (std::string_view part : parts) num_bytes += part.size();
    char* out = add_entry(block, tag, num_bytes, first_offset);
    for (std::string_view part : parts) out = std::copy(part.begin(), part.end(), out);
  }

  /// Adds an entry without its payload, of `num_bytes`. Returns where that goes.
  char* add_entry(uint32_t block, uint8_t tag, size_t num_bytes, uint32_t first_offset) {
    BlockExtras& entry = blocks_.emplace_back();
    entry.block_index = block;
    entry.first_offset = first_offset;
    char* out = entry.payload.extend(kHeadBytes + num_bytes);
    char head[kHeadBytes];
    little_endian(head, tag | uint64_t{num_bytes} << 8);
    return std::copy_n(head, kHeadBytes, out);
  }

  void add_scope(uint64_t block, uint8_t tag, std::initializer_list<std::string_view> parts) {
    add(static_cast<uint32_t>(block), tag, parts, block_size_);
    blocks_.back().scope = std::string_view(blocks_.back().payload);
  }

  void merge() {
    const auto key = [](const BlockExtras& entry) {
      return std::tuple(entry.block_index, static_cast<uint8_t>(*entry.payload.data()),
                        std::string_view(entry.payload).substr(kHeadBytes));
    };
    std::ranges::sort(blocks_, {}, key);
    auto block = blocks_.begin();
    for (auto entry = block + 1; entry != blocks_.end(); ++entry) {
      if (entry->block_index != block->block_index) {
        if (++block != entry) *block = std::move(*entry);
        continue;
      }
      block->payload += entry->payload;
      block->scope += entry->scope;
      block->first_offset = std::min(block->first_offset, entry->first_offset);
    }
    blocks_.erase(block + 1, blocks_.end());
  }

  /// The end of an item.
  int64_t check_range(int64_t start, int64_t length, size_t index) const {
    const bool is_range =
        start >= 0 && start <= kLastPosition && length >= 1 && length <= kLastPosition;
    if (is_range && start + length <= num_tokens_) return start + length;
    throw UsageError("extras[" + std::to_string(index) + "]: expected to end within the " +
                     std::to_string(num_tokens_) + " tokens, got " +
                     (is_range ? "an end of " + std::to_string(start + length) : "no range"));
  }

  const int64_t num_tokens_;
  const uint32_t block_size_;
  std::vector<BlockExtras> blocks_;
};

/// `salt_from` as a position; check_salt_from has the messages.
int64_t to_position(nb::handle salt_from, nb::handle cache_salt) {
  if (salt_from.is_none()) return 0;
  if (PyLong_CheckExact(salt_from.ptr()) && !cache_salt.is_none()) {
    int overflow = 0;
    const long long position = PyLong_AsLongLongAndOverflow(salt_from.ptr(), &overflow);
    if (overflow == 0 && position >= 0 && position <= kLastPosition) return position;
  }
  return to_int(ExtraClasses::get().module.attr("check_salt_from")(salt_from, cache_salt));
}

void add_extra(Encoder& encoder, nb::handle object, size_t index) {
  const ExtraClasses& classes = ExtraClasses::get();
  if (classes.media.is(object)) return encoder.add_media(object, classes.media, index);
  if (classes.adapter.is(object)) return encoder.add_adapter(object, classes.adapter);
  if (classes.embeddings.is(object))
    return encoder.add_embeddings(object, classes.embeddings, index);
  if (classes.extra.is(object)) return encoder.add_own(object, classes.extra);
  classes.module.attr("refuse_extra")(object, index);
}

void add_extras(Encoder& encoder, nb::handle extras) {
  if (extras.is_none()) return;
  nb::object list = nb::borrow(extras);
  if (!PyList_CheckExact(list.ptr()) && !PyTuple_CheckExact(list.ptr()))
    list = nb::list(ExtraClasses::get().module.attr("check_iterable")("extras", extras));
  encoder.reserve(static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr())) + 1);
  // A field of a subclass may be computed by Python code, so the length is read anew each time.
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.ptr()); ++i) {
    const nb::object object = nb::borrow(PySequence_Fast_GET_ITEM(list.ptr(), i));
    add_extra(encoder, object, static_cast<size_t>(i));
  }
}

/// For pagedkv/hashing.py.
std::tuple<std::vector<uint32_t>, std::vector<nb::bytes>, std::vector<nb::bytes>,
           std::vector<uint32_t>>
encode_extras(size_t num_tokens, uint32_t block_size, nb::handle cache_salt, nb::handle salt_from,
              nb::handle extras) {
  std::vector<uint32_t> block_indices, first_offsets;
  std::vector<nb::bytes> payloads, scopes;
  for (const BlockExtras& block :
       Identity{cache_salt, salt_from, extras}.encode(num_tokens, block_size)) {
    block_indices.push_back(block.block_index);
    payloads.emplace_back(block.payload.data(), block.payload.size());
    scopes.emplace_back(block.scope.data(), block.scope.size());
    first_offsets.push_back(block.first_offset);
  }
  return {block_indices, payloads, scopes, first_offsets};
}

}  // namespace

std::vector<BlockExtras> Identity::encode(size_t num_tokens, uint32_t block_size) const {
  Encoder encoder(num_tokens, block_size);
  const int64_t position = to_position(salt_from, cache_salt);
  if (!cache_salt.is_none()) {
    nb::object salt = nb::borrow(cache_salt);
    std::optional<std::string_view> bytes = bytes_of(salt);
    if (!bytes || bytes->empty() || bytes->size() > kLongestSalt) {
      salt = ExtraClasses::get().module.attr("check_salt")(cache_salt);  // has the messages
      bytes = field_bytes(salt);
    }
    encoder.add_salt(position, *bytes);
  }
  add_extras(encoder, extras);
  return encoder.finish();
}

std::vector<BlockPayload> payloads_of(const std::vector<BlockExtras>& extras) {
  std::vector<BlockPayload> payloads;
  payloads.reserve(extras.size());
  for (const BlockExtras& block : extras)
    payloads.push_back(
        {block.block_index,
         {reinterpret_cast<const uint8_t*>(block.payload.data()), block.payload.size()}});
  return payloads;
}

void bind_extras(nb::module_& m) {
  m.def("encode_extras", &encode_extras, "num_tokens"_a, "block_size"_a, "cache_salt"_a.none(),
        "salt_from"_a.none(), "extras"_a.none(), "The four lists of pagedkv.extras.BlockExtras.");
}

}  // namespace pagedkv::bindings
