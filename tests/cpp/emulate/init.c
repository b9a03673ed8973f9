// The first process of the emulated machine: runs /program with the arguments in /arguments, says how it
// ended and turns the machine off.

#include <fcntl.h>
#include <stdio.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

int main(void) {
  mkdir("/dev", 0755);
  mkdir("/proc", 0755);
  mount("devtmpfs", "/dev", "devtmpfs", 0, 0);
  mount("proc", "/proc", "proc", 0, 0);
  const int console = open("/dev/ttyS0", O_RDWR | O_NOCTTY);
  for (int i = 0; i < 3; ++i) dup2(console, i);

  static char text[4096];  // each argument ends with a zero byte
  const int file = open("/arguments", O_RDONLY);
  const ssize_t size = read(file, text, sizeof text - 1);
  char* arguments[64] = {"/program"};
  int count = 1;
  for (ssize_t i = 0; i < size && count < 63; ++i) {
    if (i == 0 || text[i - 1] == '\0') arguments[count++] = text + i;
  }

  const pid_t child = fork();
  if (child == 0) {
    execv("/program", arguments);
    perror("/program");
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  printf("\nemulated: %s %d\n", WIFEXITED(status) ? "status" : "signal",
         WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
  fflush(stdout);
  tcdrain(1);
  // What Bochs reads at this port ends it.
  ioperm(0x8900, 1, 1);
  for (const char* letter = "Shutdown"; *letter; ++letter) outb(*letter, 0x8900);
  reboot(RB_HALT_SYSTEM);
  return 1;
}
