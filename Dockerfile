# The whole platform in one image:
#   docker build -t platform .
#   docker run -p 8080:8080 -p 8090:8090/udp -v platform:/data platform
FROM rust:1.95-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked --package node --bin platform && strip target/release/platform

FROM debian:bookworm-slim
RUN useradd --system --home /data platform && install -d -o platform /data
COPY --from=build /src/target/release/platform /usr/local/bin/platform
# THIRD-PARTY.md is only in the release archive: `cargo xtask dist` needs the git repository.
COPY LICENSE /usr/share/doc/platform/LICENSE
# Of the font that the binary contains.
COPY service-kit/fonts/LICENSE /usr/share/doc/platform/LICENSE-DejaVu
USER platform
WORKDIR /data
VOLUME /data
# All services listen on 8080, trading sessions on 8090 (UDP). The sandbox accepts tokens without
# proof of identity: never run it on a public network.
ENV PLATFORM_DATA_DIR=/data PLATFORM_LISTEN__ALL=0.0.0.0:8080 PLATFORM_LISTEN__TRADING=0.0.0.0:8090
EXPOSE 8080 8090/udp
HEALTHCHECK --start-period=30s CMD ["platform", "market", "status"]
ENTRYPOINT ["platform"]
