//! Pictures that are small enough to be kept in the repository.

use std::collections::HashMap;
use std::io::Cursor;

type Colour = [u8; 3];

/// Reduces a PNG of 8 bit colours to a palette.
pub fn small_png(picture: &[u8]) -> Vec<u8> {
    let decoder = png::Decoder::new(Cursor::new(picture));
    let mut reader = decoder.read_info().expect("a PNG");
    let size = reader.output_buffer_size();
    let mut samples = vec![0; size.expect("a picture fits into memory")];
    let frame = reader.next_frame(&mut samples).expect("a whole PNG");
    let pixels: Vec<Colour> = samples[..frame.buffer_size()]
        .chunks_exact(frame.color_type.samples())
        .map(|pixel| [pixel[0], pixel[1], pixel[2]])
        .collect();
    let (palette, places) = palette(&pixels);
    let indices: Vec<u8> = pixels.iter().map(|pixel| places[pixel]).collect();
    let mut small = Vec::new();
    let mut encoder = png::Encoder::new(&mut small, frame.width, frame.height);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_palette(palette.concat());
    encoder.set_compression(png::Compression::High);
    encoder.set_filter(png::Filter::NoFilter);
    let mut writer = encoder.write_header().expect("memory takes a header");
    let written = writer.write_image_data(&indices);
    written.expect("memory takes a picture");
    writer.finish().expect("memory takes the end");
    small
}

/// Returns the colours that are missed most, by their area and their distance from those before, and the place in the
/// palette for every colour of the picture.
///
/// The flat colours of a page stay exact that way; usual quantisers mix light greys.
fn palette(pixels: &[Colour]) -> (Vec<Colour>, HashMap<Colour, u8>) {
    let mut areas: HashMap<Colour, u64> = HashMap::new();
    for pixel in pixels {
        *areas.entry(*pixel).or_default() += 1;
    }
    let mut colours: Vec<(Colour, u64)> = areas.into_iter().collect();
    // The same picture gives the same file.
    colours.sort_unstable();
    let mut nearest = vec![(u64::from(u32::MAX), 0); colours.len()];
    let mut palette = Vec::new();
    for place in 0..=u8::MAX {
        let errors = colours.iter().zip(&nearest);
        let errors = errors.map(|((colour, area), (distance, _))| (area * distance, *colour));
        let Some((error, worst)) = errors.max() else {
            break;
        };
        if error == 0 {
            break;
        }
        palette.push(worst);
        for ((colour, _), nearest) in colours.iter().zip(&mut nearest) {
            let distance = distance(*colour, worst);
            if distance < nearest.0 {
                *nearest = (distance, place);
            }
        }
    }
    let places = colours.iter().zip(&nearest);
    let places = places.map(|((colour, _), (_, place))| (*colour, *place));
    (palette, places.collect())
}

fn distance(one: Colour, other: Colour) -> u64 {
    let squares = one
        .iter()
        .zip(other)
        .map(|(one, other)| u64::from(one.abs_diff(other)).pow(2));
    squares.sum()
}
