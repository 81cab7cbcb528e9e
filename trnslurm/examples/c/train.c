/* One worker of the regression. Its variables and files are those of docs/scripts.md: In any other
 * language. Worker 0 adds up what the others send, and reports, saves and looks for a stop. */
#include <math.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WEIGHTS = 8, SAMPLES = 4096, STEPS = 200, SAVE_EVERY = 50, MOST = 1024 };

static int rank, world, peers[MOST]; /* of worker 0: everyone's socket; of others: [0] alone */

static const char *variable(const char *name) {
    const char *value = getenv(name);
    if (!value) {
        fprintf(stderr, "error: %s is not set: start this by trnslurm\n", name);
        exit(2);
    }
    return value;
}

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void whole(int send_it, int peer, void *data, size_t size) {
    for (size_t done = 0; done < size;) {
        char *rest = (char *)data + done;
        ssize_t n = send_it ? send(peer, rest, size - done, MSG_NOSIGNAL)
                            : recv(peer, rest, size - done, 0);
        check(n > 0, "another worker is gone");
        done += n;
    }
}

/* Worker 0 listens at the rendezvous; each other connects, and tells its number. */
static void meet(void) {
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *place;
    hints.ai_flags = rank ? 0 : AI_PASSIVE;
    const char *host = rank ? variable("MASTER_ADDR") : NULL;
    int on = 1, wrong = getaddrinfo(host, variable("MASTER_PORT"), &hints, &place);
    check(!wrong, "MASTER_ADDR");
    if (rank) {
        while (peers[0] = socket(AF_INET, SOCK_STREAM, 0),
               connect(peers[0], place->ai_addr, place->ai_addrlen)) {
            close(peers[0]); /* worker 0 does not listen yet */
            usleep(100000);
        }
        whole(1, peers[0], &rank, sizeof rank);
    } else {
        int door = socket(AF_INET, SOCK_STREAM, 0);
        setsockopt(door, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        check(!bind(door, place->ai_addr, place->ai_addrlen) && !listen(door, world), "MASTER_PORT");
        for (int met = 1; met < world; met++) {
            int who, peer = accept(door, NULL, NULL);
            whole(0, peer, &who, sizeof who);
            peers[who] = peer;
        }
        close(door);
    }
    freeaddrinfo(place);
}

/* Give every worker the sum over all, added up in the order of the workers. */
static void add_up(double *values, size_t count) {
    double theirs[count];
    for (int peer = 1; peer < world && !rank; peer++) {
        whole(0, peers[peer], theirs, sizeof theirs);
        for (size_t i = 0; i < count; i++) values[i] += theirs[i];
    }
    for (int peer = 1; peer < world && !rank; peer++)
        whole(1, peers[peer], values, count * sizeof *values);
    if (rank) {
        whole(1, peers[0], values, count * sizeof *values);
        whole(0, peers[0], values, count * sizeof *values);
    }
}

/* A checkpoint is whole when it has its name. */
static void save(int step, const double *weights) {
    char half[4096], name[4096];
    snprintf(half, sizeof half, "%s/half", variable("TRNSLURM_CHECKPOINTS"));
    snprintf(name, sizeof name, "%s/step-%08d", variable("TRNSLURM_CHECKPOINTS"), step);
    FILE *file = fopen(half, "w");
    check(file != NULL, half);
    fprintf(file, "%d", step);
    for (int j = 0; j < WEIGHTS; j++) fprintf(file, " %a", weights[j]);
    check(!fflush(file) && !fsync(fileno(file)) && !fclose(file) && !rename(half, name), name);
}

int main(void) {
    const char *run = variable("TRNSLURM_RUN_DIR"), *attempt = variable("TRNSLURM_ATTEMPT");
    char stop[4096], stopped[4096], metrics[4096];
    snprintf(stop, sizeof stop, "%s/state/stop-train-%s.json", run, attempt);
    snprintf(stopped, sizeof stopped, "%s/state/stopped-train-%s.json", run, attempt);
    snprintf(metrics, sizeof metrics, "%s/metrics.jsonl", run);
    rank = atoi(variable("RANK")), world = atoi(variable("WORLD_SIZE"));
    if (world > MOST) return fprintf(stderr, "error: %d workers at most\n", MOST), 2;
    meet();

    double weights[WEIGHTS] = {0};
    int step = 0;
    const char *resume = getenv("TRNSLURM_RESUME");
    if (resume && *resume) {
        FILE *file = fopen(resume, "r");
        int read = file ? fscanf(file, "%d", &step) : 0;
        for (int j = 0; file && j < WEIGHTS; j++) read += fscanf(file, "%la", &weights[j]);
        check(read == WEIGHTS + 1, resume);
        fclose(file);
    }

    for (int stops = 0; step < STEPS && !stops;) {
        double sums[WEIGHTS + 2] = {0}; /* the gradient, the loss, whether to stop */
        for (int i = rank; i < SAMPLES; i += world) {
            double x[WEIGHTS], error = 0;
            for (int j = 0; j < WEIGHTS; j++) {
                x[j] = sin((double)(i + 1) * (j + 1));
                error += x[j] * (weights[j] - j); /* what is to be found: 0, 1, 2 ... */
            }
            for (int j = 0; j < WEIGHTS; j++) sums[j] += 2 * error * x[j];
            sums[WEIGHTS] += error * error;
        }
        if (!rank) sums[WEIGHTS + 1] = !access(stop, F_OK);
        add_up(sums, WEIGHTS + 2);
        for (int j = 0; j < WEIGHTS; j++) weights[j] -= 0.05 * sums[j] / SAMPLES;
        stops = sums[WEIGHTS + 1] > 0;
        step++;
        if (rank) continue;
        FILE *file = fopen(metrics, "a");
        check(file != NULL, metrics);
        fprintf(file, "{\"attempt\": %s, \"step\": %d, \"steps\": %d, \"loss\": %.9g}\n", attempt,
                step, STEPS, sums[WEIGHTS] / SAMPLES);
        fclose(file);
        if (stops || step % SAVE_EVERY == 0) save(step, weights);
        if (stops) {
            check((file = fopen(stopped, "w")) != NULL, stopped);
            fprintf(file, "{\"step\": %d, \"saved\": true}\n", step);
            fclose(file);
        }
    }
    return 0;
}
