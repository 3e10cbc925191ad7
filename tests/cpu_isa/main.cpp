// All checks, as an ordinary program or as the first process of an emulated machine, which it turns off at the end.
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "checks.h"
#include "interface.h"

namespace checks {
namespace {

int passed = 0, failed = 0;

void report(const std::string& name, bool held, const std::string& measured) {
  ++(held ? passed : failed);
  std::printf("%s %s%s\n", held ? "ok    " : "FAILED", name.c_str(), measured.c_str());
  std::fflush(stdout);
}

}  // namespace

void report_close(const std::string& name, double error, double allowed) {
  char measured[80];
  std::snprintf(measured, sizeof measured, " (off by %.1e, allowed %.1e)", error, allowed);
  report(name, error <= allowed, measured);
}

void report_same(const std::string& name, bool same) { report(name, same, ""); }

}  // namespace checks

namespace {

// What was compiled for, as the kernels' own conditions see it.
void print_target() {
#if defined(__AVX512F__)
  const char* vectors = "AVX-512";
#elif defined(__AVX2__)
  const char* vectors = "AVX2";
#else
  const char* vectors = "no AVX2";
#endif
#if defined(OCTAVO_EMULATE_VNNI)
  const char* bytes = "VNNI written out";
#elif defined(__AVX512F__) && defined(__AVX512VNNI__)
  const char* bytes = "VNNI";
#elif !defined(__AVX512F__) && defined(__AVXVNNI__)
  const char* bytes = "AVX-VNNI";
#else
  const char* bytes = "no VNNI";
#endif
  std::printf("target %s, %s; %d lanes, layout %lld\n", vectors, bytes, octavo_lanes(),
              static_cast<long long>(octavo_linear_layout()));
}

}  // namespace

int main() {
  bool first = getpid() == 1;
  if (first) {
    mkdir("/proc", 0755);
    mount("proc", "/proc", "proc", 0, nullptr);  // libgomp looks there
  }
  print_target();
  const char* variable = std::getenv("CHECKS");  // comma-separated; from the kernel's command line when emulated
  std::string wanted = variable ? variable : "formats,linear,attention,decoder";
  auto is_wanted = [&](const char* name) { return wanted.find(name) != std::string::npos; };
  if (is_wanted("formats")) checks::check_formats();
  if (is_wanted("linear")) checks::check_linear();
  if (is_wanted("attention")) checks::check_attention();
  if (is_wanted("decoder")) checks::check_decoder();
  std::printf("%d passed, %d failed\n", checks::passed, checks::failed);
  std::fflush(stdout);
  if (first) {
    tcdrain(STDOUT_FILENO);
    reboot(RB_POWER_OFF);
    for (;;) pause();
  }
  return checks::failed ? 1 : 0;
}
