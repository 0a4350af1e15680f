//! Pictures that are small enough to be kept in the repository.

use std::io::Cursor;

use quantette::deps::palette::Srgb;
use quantette::{ImageRef, PaletteSize, Pipeline, QuantizeMethod};

/// Reduces a PNG of 8 bit colours to a palette of 256.
pub fn small_png(picture: &[u8]) -> Vec<u8> {
    let mut reader = png::Decoder::new(Cursor::new(picture))
        .read_info()
        .expect("a PNG");
    let size = reader
        .output_buffer_size()
        .expect("a picture fits into memory");
    let mut samples = vec![0; size];
    let frame = reader.next_frame(&mut samples).expect("a whole PNG");
    let channels = frame.color_type.samples();
    let pixels: Vec<Srgb<u8>> = samples[..frame.buffer_size()]
        .chunks_exact(channels)
        .map(|pixel| Srgb::new(pixel[0], pixel[1], pixel[2]))
        .collect();
    let image = ImageRef::new(frame.width, frame.height, &pixels).expect("one pixel a place");
    let indexed = Pipeline::new()
        .palette_size(PaletteSize::MAX)
        .quantize_method(QuantizeMethod::Wu)
        // Flat colours stay flat, and compress.
        .ditherer(None)
        .input_image(image)
        .output_srgb8_indexed_image();
    let palette = indexed.palette().iter();
    let palette: Vec<u8> = palette
        .flat_map(|color| [color.red, color.green, color.blue])
        .collect();
    let mut small = Vec::new();
    let mut encoder = png::Encoder::new(&mut small, frame.width, frame.height);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_palette(palette);
    encoder.set_compression(png::Compression::High);
    encoder.set_filter(png::Filter::NoFilter);
    let mut writer = encoder.write_header().expect("memory takes a header");
    writer
        .write_image_data(indexed.indices())
        .expect("memory takes a picture");
    writer.finish().expect("memory takes the end");
    small
}
