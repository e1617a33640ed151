/* Writes down every attempt to reach somebody: names looked up, and addresses connected or sent to. For tests only.
 *
 * Loaded by LD_PRELOAD into every process of a run; tests/e2e/calls.py compiles it and reads what it wrote. A UDP
 * "connect" sends nothing (it is how programs ask for their own address) and is not written down; a datagram is.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void note(const char *what, const char *whom) {
  const char *path = getenv("ASYNCRL_TEST_CALLS");
  char line[512];
  if (path == NULL || whom == NULL) return;
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) abort(); /* a call that is not counted would be a call not seen */
  int length = snprintf(line, sizeof line, "%s %s\n", what, whom);
  if (write(file, line, (size_t)length) != length) abort();
  close(file);
}

static void note_address(const char *what, const struct sockaddr *address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (address == NULL) return;
  if (address->sa_family == AF_INET)
    inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, text, sizeof text);
  else if (address->sa_family == AF_INET6)
    inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)address)->sin6_addr, text, sizeof text);
  else
    return; /* of this machine by its nature */
  note(what, text);
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
  int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "connect");
  int type = 0;
  socklen_t size = sizeof type;
  getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size);
  if (type != SOCK_DGRAM) note_address("connect", address);
  return real(fd, address, length);
}

ssize_t sendto(int fd, const void *data, size_t n, int flags, const struct sockaddr *address, socklen_t length) {
  ssize_t (*real)(int, const void *, size_t, int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "sendto");
  note_address("sendto", address);
  return real(fd, data, n, flags, address, length);
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
  int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) = dlsym(RTLD_NEXT, "getaddrinfo");
  note("look-up", node);
  return real(node, service, hints, found);
}
