/* What the laboratory needs in C: `lab init`, the first process of a node, and `lab switch`, slow and lossy links.

   The switch obeys lines on standard input, answers "done" to each, and ends with its input. "device I" makes the TUN
   device labI in the switch's network namespace, to be moved to node I. "link I J DELAY_MS JITTER_MS LOSS_PERCENT"
   changes a link in one direction. A packet to 10.77.0.(J+1) that any of the devices sends is delivered by labJ. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <linux/if.h>
#include <linux/if_tun.h>

enum { MOST = 32, LARGEST = 65536, AT_ONCE = 64 };

struct packet {
    double at;
    int to, size;
    struct packet *next;
    unsigned char bytes[];
};

struct link {
    double delay_s, jitter_s, loss;
};

static int devices[MOST]; /* -1: none */
static struct link links[MOST][MOST];
static struct packet *waiting; /* the earliest first */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void hold(struct packet *packet) {
    struct packet **place = &waiting;
    while (*place && (*place)->at <= packet->at)
        place = &(*place)->next;
    packet->next = *place;
    *place = packet;
}

static void deliver(int to, const unsigned char *bytes, int size) {
    if (devices[to] < 0 || write(devices[to], bytes, size) < 0) {
        /* its node is off: the packet is lost, as on a real link */
    }
}

static void forward(int from, const unsigned char *bytes, int size) {
    int to = bytes[19] - 1;
    if (size < 20 || bytes[0] >> 4 != 4 || bytes[16] != 10 || bytes[17] != 77 || to < 0 || to >= MOST)
        return;
    struct link link = links[from][to];
    if (link.loss > 0 && drand48() < link.loss)
        return;
    if (link.delay_s + link.jitter_s == 0) {
        deliver(to, bytes, size);
        return;
    }
    struct packet *packet = malloc(sizeof *packet + size);
    packet->at = now() + link.delay_s + drand48() * link.jitter_s;
    packet->to = to;
    packet->size = size;
    memcpy(packet->bytes, bytes, size);
    hold(packet);
}

static void make_device(int number) {
    struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    sprintf(request.ifr_name, "lab%d", number);
    if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) {
        perror("/dev/net/tun");
        exit(1);
    }
    if (devices[number] >= 0)
        close(devices[number]);
    devices[number] = device;
}

static void obey(const char *line) {
    int from, to;
    double delay_ms, jitter_ms, loss;
    if (sscanf(line, "device %d", &to) == 1 && to >= 0 && to < MOST)
        make_device(to);
    else if (sscanf(line, "link %d %d %lf %lf %lf", &from, &to, &delay_ms, &jitter_ms, &loss) == 5 && from >= 0 &&
             from < MOST && to >= 0 && to < MOST)
        links[from][to] = (struct link){delay_ms / 1000, jitter_ms / 1000, loss / 100};
    else
        exit(2);
    puts("done");
    fflush(stdout);
}

static void run_switch(void) {
    static unsigned char bytes[LARGEST];
    char line[256];
    for (int i = 0; i < MOST; i++)
        devices[i] = -1;
    for (;;) {
        struct pollfd polled[MOST + 1] = {{.fd = 0, .events = POLLIN}};
        for (int i = 0; i < MOST; i++)
            polled[i + 1] = (struct pollfd){.fd = devices[i], .events = POLLIN};
        double left_s = waiting ? waiting->at - now() : 0;
        poll(polled, MOST + 1, waiting ? (left_s > 0 ? (int)(left_s * 1000) + 1 : 0) : -1);
        while (waiting && waiting->at <= now()) {
            struct packet *packet = waiting;
            waiting = packet->next;
            deliver(packet->to, packet->bytes, packet->size);
            free(packet);
        }
        for (int i = 0; i < MOST; i++) {
            if (polled[i + 1].revents & (POLLERR | POLLHUP)) { /* its node is off, and the device with it */
                close(devices[i]);
                devices[i] = -1;
            }
            for (int k = 0, size; polled[i + 1].revents & POLLIN && devices[i] >= 0 && k < AT_ONCE; k++) {
                if ((size = read(devices[i], bytes, sizeof bytes)) <= 0)
                    break;
                forward(i, bytes, size);
            }
        }
        if (polled[0].revents) {
            if (!fgets(line, sizeof line, stdin))
                exit(0);
            obey(line);
        }
    }
}

static void run_init(void) {
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    puts("ready");
    fflush(stdout);
    for (;;)
        if (waitpid(-1, NULL, 0) < 0)
            usleep(100000);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "init"))
        run_init();
    if (argc == 2 && !strcmp(argv[1], "switch"))
        run_switch();
    fprintf(stderr, "usage: %s init | switch\n", argv[0]);
    return 2;
}
