// The functions of NVRTC that the compiler asks for. A "binary" is the program's text; a text with #error does not compile.
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

struct Program { std::string text, name, headers; };
std::atomic<int> inside{0};

extern "C" {
std::atomic<int> compiled{0}, most{0}, alive{0};

size_t std_hash(const char* data, size_t size) { return std::hash<std::string>{}(std::string(data, size)); }

int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 5, 0; }
int nvrtcCreateProgram(Program** out, const char* text, const char*, int count, const char** headers, const char** names) {
  *out = new Program{text, "", ""};
  for (int i = 0; i < count; ++i) (*out)->headers += std::string(names[i]) + ";";
  return ++alive, 0;
}
int nvrtcDestroyProgram(Program** program) { return delete *program, --alive, 0; }
int nvrtcAddNameExpression(Program* program, const char* name) { return program->name = std::string("_Z") + name, 0; }
int nvrtcCompileProgram(Program* program, int count, const char** options) {
  int now = ++inside, seen = most;
  while (seen < now && !most.compare_exchange_weak(seen, now)) {}
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  --inside, ++compiled;
  for (int i = 0; i < count; ++i) program->headers += std::string(options[i]) + ";";
  return program->text.find("#error") == std::string::npos ? 0 : 6;
}
int nvrtcGetProgramLogSize(Program*, size_t* size) { return *size = 8, 0; }
int nvrtcGetProgramLog(Program*, char* log) { return std::strcpy(log, "a fault"), 0; }
int nvrtcGetLoweredName(Program* program, const char*, const char** name) { return *name = program->name.c_str(), 0; }
int nvrtcGetCUBINSize(Program* program, size_t* size) { return *size = (program->headers + program->text).size(), 0; }
int nvrtcGetCUBIN(Program* program, char* to) {
  std::string binary = program->headers + program->text;
  return std::memcpy(to, binary.data(), binary.size()), 0;
}
}
